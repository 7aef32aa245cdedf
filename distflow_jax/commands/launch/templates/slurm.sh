{#- A batch script of trainers, one process per node, or of workers, an array of jobs.

workers      whether it is that of the workers
job_name, array, nodes, gpus, cpus, time, partition, log, extra   of sbatch; "" or 0: none
env          assignments of variables for a shell
command      of each process, for a shell
-#}
#!/bin/bash
#SBATCH --job-name={{ job_name }}
{% if array %}
#SBATCH --array={{ array }}
{% endif %}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
{% if cpus %}
#SBATCH --cpus-per-task={{ cpus }}
{% else %}
#SBATCH --exclusive
#SBATCH --mem=0
{% endif %}
#SBATCH --time={{ time }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if flags.account %}
#SBATCH --account={{ flags.account }}
{% endif %}
#SBATCH --chdir={{ flags.directory }}
#SBATCH --output={{ log }}
#SBATCH --open-mode=append
#SBATCH --requeue
{# to the processes. B:TERM would go to this script, and srun, which then kills the processes #}
#SBATCH --signal=TERM@{{ flags.grace_seconds }}
{% for option in extra %}
#SBATCH {{ option }}
{% endfor %}
export {{ env }}
{% for line in flags.setup %}
{{ line }}
{% endfor %}

{% if workers %}
for try in $(seq 0 {{ flags.worker_retries }}); do
    srun --nodes=1 --ntasks=1 {% if cpus %}--cpus-per-task={{ cpus }}{% else %}--cpu-bind=none{% endif %} \
        {{ command }}
    code=$?
    case "$code" in 0|2|75) break ;; esac  # the run has ended; a user error; start it again
    sleep 10
done
# 75: SIGTERM came, or no trainer answers. Back into the queue, while there are trainers.
if [ "$code" -eq 75 ] && [ -n "$(squeue --noheader --jobs="$DISTFLOW_TRAINERS" 2>/dev/null)" ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
{% else %}
# a new secret at each start, which srun passes on: the processes of this step admit no others
export DISTFLOW_JOB_TOKEN="${DISTFLOW_JOB_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
{# one CPU per task is the default, whatever the job has. --wait: srun's exit code is the highest of
its tasks, and that of one which it kills for being late would hide the 75 of the others #}
srun --nodes={{ nodes }} --ntasks={{ nodes }} --ntasks-per-node=1 {% if cpus %}--cpus-per-task={{ cpus }}{% else %}--cpu-bind=none{% endif %} --kill-on-bad-exit=0 --wait=60 \
    {{ command }}
code=$?
# 75: SIGTERM came, a checkpoint is saved, start again. Anything else is the end of the job.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
{% endif %}
