# Runs at every boot of each worker of a TPU VM, as root: trains, reports to the bucket, and deletes
# the slice if nobody else does. The lines above set `folder`, where worker 0 reports to, and the
# others to `worker-N` in it; `slices`, their number, and `hosts`, that of each slice's workers;
# `limit`, the seconds that a run may take;
# `delete`, the command that deletes the slice, empty if it is to stay; and define receive, install
# and train.
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

# The slice of this worker, from the lines of its environment, MEGASCALE_SLICE_ID: '1' for one.
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
  # Without its number, a worker would report in the place of another: those of no slice are last.
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

# A worker that failed says so in `failed`. The others notice by themselves that they lost it; one
# that does not, because it still installs or waits for the others, is stopped a minute later.
stop_after_others() {
  if gcloud storage cp --quiet "$folder/failed" "$home/failed" >/dev/null 2>&1; then
    sleep 60
    touch "$home/stopped"
    kill "$1"
  fi
}

# The launcher, which deletes the slice, may have been switched off.
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
