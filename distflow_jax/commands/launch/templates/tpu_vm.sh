{#- One command line, by which gcloud starts the run on all hosts.

remote       the command of each host, for its shell
-#}
gcloud compute tpus tpu-vm ssh {{ flags.name }} --zone={{ flags.zone }} --worker=all
{%- if flags.project %} --project={{ flags.project }}{% endif %}
{%- if flags.internal_ip %} --internal-ip{% endif %} --command={{ remote | sh }}

