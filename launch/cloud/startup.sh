# Runs at every boot of a TPU VM, as root: trains, reports to the bucket, and deletes the slice if
# nobody else does. The lines above set `folder`, where it reports to; `limit`, the seconds that a
# run may take; `delete`, the command that deletes the slice, empty if it is to stay; and define
# receive, install and train.
if [ "${1:-}" = work ]; then
  set -e
  receive
  install
  train
  exit
fi

log="$home/log.txt"
mkdir -p "$home"
if [ ! -e "$home/ends" ]; then
  echo "$(($(date +%s) + limit))" >"$home/ends"
fi

left() {
  local seconds=$(($(<"$home/ends") - $(date +%s)))
  echo "$((seconds > 1 ? seconds : 1))"
}

report() {
  gcloud storage cp --quiet "$log" "$folder/log.txt" >/dev/null 2>&1
}

# The launcher, which deletes the slice, may have been switched off.
delete_after() {
  if [ "${#delete[@]}" -gt 0 ]; then
    sleep "$1"
    "${delete[@]}" >>"$log" 2>&1
  fi
}

if [ -e "$home/done" ]; then # the machine was restarted after the end of the run
  delete_after 900
  exit 0
fi

while sleep 20; do report; done &
reporter=$!
timeout --kill-after=300 "$(left)" bash "$0" work >>"$log" 2>&1
code_of_exit=$?
kill "$reporter"
report
if [ "$code_of_exit" -ne 75 ]; then # 75: stopped and saved, as before a preemption; the next boot resumes
  touch "$home/done"
fi
printf '%s\n' "$code_of_exit" >"$home/exit_code"
for _ in {1..60}; do
  if gcloud storage cp --quiet "$home/exit_code" "$folder/exit_code"; then break; fi
  sleep 20
done
if [ "$code_of_exit" -eq 75 ]; then
  delete_after "$(left)"
else
  delete_after 900
fi
