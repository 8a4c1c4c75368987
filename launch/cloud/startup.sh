# Runs at every boot of a TPU VM, as root: trains, and reports to the bucket. The lines above set
# `folder`, where it reports to, and define receive, install and train.
if [ -e "$home/done" ]; then # the machine was restarted after the end of the run
  exit 0
fi
log="$home/log.txt"
mkdir -p "$home"

report() {
  gcloud storage cp --quiet "$log" "$folder/log.txt" >/dev/null 2>&1
}

while sleep 20; do report; done &
reporter=$!
(
  set -e
  receive
  install
  train
) >>"$log" 2>&1
code_of_exit=$?
kill "$reporter"
report
if [ "$code_of_exit" -ne 75 ]; then # 75: stopped and saved, as before a preemption; the next boot resumes
  touch "$home/done"
fi
printf '%s\n' "$code_of_exit" >"$home/exit_code"
gcloud storage cp --quiet "$home/exit_code" "$folder/exit_code"
