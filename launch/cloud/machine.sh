# Receives, installs and trains what `tftpu launch` sent. The lines above set its values, quoted:
# shipped, sums, package, extras, python, code, arguments; `home` is the folder to work in.

# Copies a file of a bucket: fetch ADDRESS FOLDER. A job of Vertex AI has the buckets under /gcs.
fetch() {
  if [ -d "${TFTPU_GCS:-/gcs}" ]; then
    cp "${TFTPU_GCS:-/gcs}/${1#gs://}" "$2"
  else
    gcloud storage cp --quiet "$1" "$2"
  fi
}

receive() {
  mkdir -p "$home/shipped" "$home/code"
  while read -r _ name; do
    if [ -n "$name" ]; then fetch "$shipped/$name" "$home/shipped/"; fi
  done <<<"$sums"
  (cd "$home/shipped" && printf '%s' "$sums" | sha256sum --check --quiet -)
  if [ -n "$code" ]; then
    tar -xzf "$home/shipped/code.tar.gz" -C "$home/code"
  fi
}

install() {
  venv="${TFTPU_VENV:-$home/venv}" # an image may bring one
  python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet uv
  if [ ! -x "$venv/bin/python" ]; then
    # The TPU VMs' own Python is 3.10, too old for tftpu; this one is like the sender's.
    python3 -m uv venv --quiet "--python=$python" "$venv"
  fi
  case "$package" in
    gs://*)
      fetch "$package" "$home/"
      requirement="tftpu[$extras] @ file://$home/${package##*/}"
      ;;
    *.whl) requirement="tftpu[$extras] @ file://$home/shipped/$package" ;;
    *) requirement="$package" ;;
  esac
  options=("--constraints=$home/shipped/constraints.txt")
  options+=("--overrides=$home/shipped/overrides.txt")
  if [ -n "$code" ] && [ -e "$home/code/$code/requirements.txt" ]; then
    options+=("--requirements=$home/code/$code/requirements.txt")
  fi
  python3 -m uv pip install --quiet "--python=$venv/bin/python" --reinstall-package=tftpu \
    "${options[@]}" "$requirement"
}

train() {
  rm -f /tmp/libtpu_lockfile # left by a process that a restart of the machine ended
  cd "$home/code/$code" # paths in a config may be relative to its folder
  "$venv/bin/tftpu" "${arguments[@]}"
}
