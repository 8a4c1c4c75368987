# Runs at every boot of a TPU VM, as root: trains, and reports to the bucket. The lines above set the
# values of the run, quoted: name, folder, package, config_text, arguments.
set -u
export HOME=/root
home="${TFTPU_HOME:-/opt/tftpu}"
log="$home/log.txt"
mkdir -p "$home"
if [ -e "$home/done" ]; then # the machine was restarted after the end of the run
  exit 0
fi

report() {
  gcloud storage cp --quiet "$log" "$folder/log.txt" >/dev/null 2>&1
}

install() {
  # The images have Python 3.10, which is too old for tftpu.
  python3 -m pip install --quiet uv
  python3 -m uv venv --quiet --allow-existing --python=3.12 "$home/venv"
  case "$package" in
    gs://*)
      gcloud storage cp --quiet "$package" "$home/"
      requirement="tftpu[tpu] @ file://$home/$(basename "$package")"
      ;;
    *) requirement="$package" ;;
  esac
  python3 -m uv pip install --quiet --python="$home/venv/bin/python" "$requirement"
}

train() {
  rm -f /tmp/libtpu_lockfile # left by a process that a restart of the machine ended
  if [ -n "$config_text" ]; then
    printf '%s' "$config_text" >"$home/$name.py"
    arguments=(train "--config=$home/$name.py" "${arguments[@]}")
  fi
  "$home/venv/bin/tftpu" "${arguments[@]}"
}

while sleep 20; do report; done &
reporter=$!
(
  set -e
  install
  train
) >>"$log" 2>&1
code=$?
kill "$reporter"
report
if [ "$code" -ne 75 ]; then # 75: stopped and saved, as before a preemption; the next boot resumes
  touch "$home/done"
fi
printf '%s\n' "$code" >"$home/exit_code"
gcloud storage cp --quiet "$home/exit_code" "$folder/exit_code"
