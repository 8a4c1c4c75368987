# Runs at every boot of each worker of a TPU VM, as root: trains, reports to the bucket, and deletes
# the slice if the launcher does not. The lines above define receive, install and train, and set:
# folder: the folder to which worker 0 reports; worker N reports to `worker-N` in it
# slices, hosts: the number of slices, and the number of workers of each slice
# limit: the seconds that a run may take
# delete: the command that deletes the slice; empty if the slice is kept
if [ "${1:-}" = work ]; then
  set -e
  if [ "${2:-0}" -ge "$((slices * hosts))" ]; then
    echo "The metadata server does not say which slice this worker belongs to."
    exit 1
  fi
  receive
  install
  train
  exit
fi

log="$home/log.txt"
mkdir -p "$home"
rm -f "$home/stopped"
if [ ! -e "$home/ends" ]; then
  echo "$(($(date +%s) + limit))" >"$home/ends"
fi

attribute() {
  curl --silent --fail --header "Metadata-Flavor: Google" \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

# Prints the number of this worker's slice. A line of `tpu-env` is MEGASCALE_SLICE_ID: '1'.
slice_id() {
  attribute tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: *'*\([0-9]\+\).*/\1/p" | grep .
}

workers=$((slices * hosts))
worker=0
if [ "$hosts" -gt 1 ]; then
  until worker=$(attribute agent-worker-number); do sleep 5; done
fi
if [ "$slices" -gt 1 ]; then
  slice=""
  for _ in {1..120}; do
    if slice=$(slice_id); then break; fi
    sleep 5
  done
  # A worker of an unknown slice gets a number past the last one, so as not to replace another.
  worker=$((${slice:-$slices} * hosts + worker))
fi
reports="$folder"
if [ "$worker" -gt 0 ]; then reports="$folder/worker-$worker"; fi

left() {
  local seconds=$(($(<"$home/ends") - $(date +%s)))
  echo "$((seconds > 1 ? seconds : 1))"
}

report() {
  gcloud storage cp --quiet "$log" "$reports/log.txt" >/dev/null 2>&1
}

# A worker that failed writes the file `failed`. The others usually notice the loss themselves; one
# that does not, because it still installs or waits for the others, is stopped a minute later.
stop_after_others() {
  if gcloud storage cp --quiet "$folder/failed" "$home/failed" >/dev/null 2>&1; then
    sleep 60
    touch "$home/stopped"
    kill "$1"
  fi
}

# Deletes the slice after $1 seconds (other workers: 300 more), if the launcher no longer runs.
delete_after() {
  if [ "${#delete[@]}" -gt 0 ]; then
    sleep "$(($1 + (worker > 0 ? 300 : 0)))"
    "${delete[@]}" >>"$log" 2>&1
  fi
}

if [ -e "$home/done" ]; then # the machine was restarted after the end of the run
  delete_after 900
  exit 0
fi

# The run resumes: whoever follows it must not take the code of its saved stop for its end.
if [ -e "$home/exit_code" ]; then
  gcloud storage rm --quiet "$reports/exit_code" >/dev/null 2>&1
fi

timeout --kill-after=300 "$(left)" bash "$0" work "$worker" >>"$log" 2>&1 &
run=$!
while sleep 20; do
  report
  if [ "$workers" -gt 1 ]; then stop_after_others "$run"; fi
done &
reporter=$!
wait "$run"
code_of_exit=$?
kill "$reporter"
if [ -e "$home/stopped" ] && [ "$code_of_exit" -ne 0 ]; then
  code_of_exit=69 # another host was lost
fi
report
if [ "$code_of_exit" -ne 75 ]; then # 75: stopped and saved, as before a preemption; the next boot resumes
  touch "$home/done"
fi
printf '%s\n' "$code_of_exit" >"$home/exit_code"
for _ in {1..60}; do
  if gcloud storage cp --quiet "$home/exit_code" "$reports/exit_code"; then break; fi
  sleep 20
done
if [ "$workers" -gt 1 ] && [ "$code_of_exit" -ne 0 ] && [ "$code_of_exit" -ne 75 ]; then
  gcloud storage cp --quiet "$home/exit_code" "$folder/failed"
fi
if [ "$code_of_exit" -eq 75 ]; then
  delete_after "$(left)"
else
  delete_after 900
fi
