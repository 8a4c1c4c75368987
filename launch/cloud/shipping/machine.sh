# Receives and installs what `tftpu launch` sent, and trains. The lines above set these variables:
# shipped, sums, package, extras, python, code, arguments; `home` is the folder to work in.

# Copies a file of a bucket: fetch ADDRESS FOLDER. A job of Vertex AI has the buckets under /gcs; a
# plain container has no gcloud, and takes a token of its service account from the metadata server.
fetch() {
  if [ -d "${TFTPU_GCS:-/gcs}" ]; then
    cp "${TFTPU_GCS:-/gcs}/${1#gs://}" "$2"
  elif command -v gcloud >/dev/null; then
    gcloud storage cp --quiet "$1" "$2"
  else
    python3 - "$1" "$2" <<'END'
import json, os, shutil, sys, urllib.parse, urllib.request
server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
account = f"http://{server}/computeMetadata/v1/instance/service-accounts/default/token"
request = urllib.request.Request(account, headers={"Metadata-Flavor": "Google"})
with urllib.request.urlopen(request, timeout=60) as answer:
    token = json.load(answer)["access_token"]
bucket, _, name = sys.argv[1].removeprefix("gs://").partition("/")
storage = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
url = f"{storage}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
target = os.path.join(sys.argv[2], os.path.basename(name))
with urllib.request.urlopen(request, timeout=60) as answer, open(target, "wb") as file:
    shutil.copyfileobj(answer, file)
END
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
    *://*) requirement="$package" ;;
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

# `exec` replaces this shell with tftpu, so that the signals of a preemption reach it.
train() {
  rm -f /tmp/libtpu_lockfile # left by a process that a restart of the machine ended
  cd "$home/code/$code" # paths in a config may be relative to its folder
  exec "$venv/bin/tftpu" "${arguments[@]}"
}
