"""JAX's coordination service has mutual TLS if variables ask for it, or the job says why not."""

import jax
import pytest
from support import haste, programs

from distflow_jax.cluster.mutual_tls import AUTHORITIES, CERTIFICATE, KEY, PREFIX, set_mutual_tls

needs_jax = pytest.mark.skipif(
    not hasattr(jax.config, "jax_mtls_cert_file"), reason="jax has no mutual TLS before 0.12"
)
# Process 0 calls its own service without and with the certificate: HTTP/2 begins with settings.
JOB = """
import os, socket, ssl
from jax._src import distributed
from distflow_jax.cluster import job, processes
processes.initialize(job.find(os.environ))
host, port = distributed.global_state.coordinator_address.rsplit(":", 1)
for pair in ((), (os.environ["JAX_MTLS_CERT_FILE"], os.environ["JAX_MTLS_KEY_FILE"])):
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(["h2"])
    if pair:
        context.load_cert_chain(*pair)
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as call:
        print("with" if pair else "without", "a certificate", len(call.recv(9)))
print("gathered", processes.all_gather_text(str(processes.process_index())))
processes.shutdown()
"""


@pytest.fixture
def pem(tmp_path):
    """{variable: file} of a certificate that is its own authority."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    programs.certificate(cert, key)
    return {CERTIFICATE: str(cert), KEY: str(key), AUTHORITIES: str(cert)}


def test_without_its_variables_nothing_is_asked_for():
    assert not set_mutual_tls({})


@pytest.mark.skipif(hasattr(jax.config, "jax_mtls_cert_file"), reason="jax has mutual TLS")
def test_a_jax_that_would_ignore_the_variables_is_an_error(pem):
    with pytest.raises(ValueError, match="no mutual TLS.*install jax 0.12"):
        set_mutual_tls(pem)


@needs_jax
@pytest.mark.parametrize(
    "change, words",
    [
        ({CERTIFICATE: ""}, f"without {CERTIFICATE}"),
        ({KEY: "", AUTHORITIES: ""}, f"without {KEY} and {AUTHORITIES}"),
        ({PREFIX: "spiffe://example.org"}, f"{PREFIX}=spiffe://example.org must end with /"),
        ({KEY: "/nowhere/key.pem"}, f"{KEY}=/nowhere/key.pem"),
        ({AUTHORITIES: "key"}, f"{AUTHORITIES}=.* has no certificate"),
        ({KEY: "other"}, f"{KEY}=.* is not the key of {CERTIFICATE}"),
    ],
)
def test_files_that_do_not_fit_are_named_before_the_job_starts(pem, tmp_path, change, words):
    programs.certificate(tmp_path / "other.cert", tmp_path / "other")
    named = {"key": pem[KEY], "other": str(tmp_path / "other")}
    changed = {name: named.get(value, value) for name, value in change.items()}
    with pytest.raises((ValueError, OSError), match=words):
        set_mutual_tls(pem | changed)


@needs_jax
@pytest.mark.multiprocess
def test_a_stranger_without_a_certificate_gets_nothing(pem, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launch = ("scripts/launch_local.py", "--processes=2", "--")
    done = programs.finished(*launch, script, env=haste.environment() | pem)
    assert done.stdout.count("gathered ['0', '1']") == 2
    assert done.stdout.count("without a certificate 0\n") == 2
    assert done.stdout.count("with a certificate 9\n") == 2
