#!/bin/sh
# Does this endpoint read pages? Asks for its health and its models, has it read one page, and shows what came back.
#
#   serving/smoke.sh URL [PAGE [WORDS]]
#
#   URL     the endpoint, with or without /v1: vLLM, llama-server, a router, nginx before one, rapidocr-server.py
#   PAGE    a picture of a page, sent as it is (default: page.png beside this script, whose words are known)
#   WORDS   words that stand on PAGE; half of them must be in the text (default: none are looked for)
#
# Environment: VLLM_API_KEY, the key to send; MODEL, which one to ask (default: the first that is listed);
# MAX_TOKENS (1024) for the text; PATIENCE (300), seconds to wait for it.
# Ends with 0: it reads; 1: it does not, and the line that begins with FAIL says what; 2: usage. Needs curl, python3.
set -u
export PYTHONUTF8=1

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
url=${1:-}
page=${2:-$here/page.png}
words=${3:-}
[ $# -ge 2 ] || words='Night Catalogue reading room archivist harbour kettle desk'

usage() {
  echo "smoke.sh: $1; usage: smoke.sh URL [PAGE [WORDS]]" >&2
  exit 2
}
case $url in
  http://* | https://*) ;;
  *) usage "no URL of an endpoint but '$url'" ;;
esac
[ $# -le 3 ] || usage "$# words are too many"
[ -r "$page" ] || usage "can't read the page $page"
for tool in curl python3; do
  command -v $tool >/dev/null || usage "needs $tool on PATH"
done
url=${url%/}
url=${url%/v1}

scratch=$(mktemp -d) || usage "can't make a folder for answers"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM

failed() {
  printf 'FAIL  %-8s%s\n' "$1" "$2"
  exit 1
}
passed() {
  printf 'ok    %-8s%s\n' "$1" "$2"
}

# The key goes by file: on the command line every user of the machine could read it.
{
  printf 'silent\nshow-error\nlocation\nconnect-timeout = 10\n'
  [ -z "${VLLM_API_KEY:-}" ] || printf 'header = "Authorization: Bearer %s"\n' "$VLLM_API_KEY"
} >"$scratch/curl"

# ask PATH [curl options]: the status goes to $status, the answer to $scratch/answer.
ask() {
  path=$1
  shift
  status=$(curl --config "$scratch/curl" --output "$scratch/answer" --write-out '%{http_code}' "$@" "$url$path" \
    2>"$scratch/error") || status="nothing ($(cat "$scratch/error"))"
}
# python PROGRAM [arguments]: reads the answer on stdin; what it prints is the result.
python() {
  python3 -c "$@" <"$scratch/answer" 2>"$scratch/error"
}
start() {
  head -c 300 "$scratch/answer" 2>/dev/null | LC_ALL=C tr -cd ' -~' # nothing that a terminal would obey
}

# -- health

ask /health --max-time 30
if [ "$status" = 503 ]; then
  # a router says so when one of its servers is gone, and goes on with the others
  ask /readiness --max-time 30
  [ "$status" = 200 ] && status=ready || status=503
fi
case $status in
  200) passed health "$url/health answers 200" ;;
  ready) passed health "$url/readiness answers 200, /health 503: a router that misses a server" ;;
  404) passed health "no /health there (404): some routers have none" ;;
  503) failed health "$url/health answers 503: it is still loading, or its engine is dead: see its log" ;;
  *) failed health "$url/health answers $status: is it running, and is this its address?" ;;
esac

# -- models

ask /v1/models --max-time 30
case $status in
  200) ;;
  401 | 403) failed models "$url/v1/models answers $status: set VLLM_API_KEY to its key" ;;
  *) failed models "$url/v1/models answers $status: no server that speaks the OpenAI API" ;;
esac
listed=$(python '
import json, sys
for card in json.load(sys.stdin)["data"]:
    print(card["id"])') || failed models "$url/v1/models is no list of models: $(start)"
[ -n "$listed" ] || failed models "$url/v1/models lists no model"
model=${MODEL:-$(printf '%s\n' "$listed" | head -n 1)}
printf '%s\n' "$listed" | grep -qxF -- "$model" ||
  failed models "$model is not served; served: $(printf '%s' "$listed" | tr '\n' ' ')"

ask /version --max-time 30
engine=$(python '
import json, sys
print(", engine", json.load(sys.stdin)["version"])') || engine=
passed models "$model$engine"

# -- one page: the picture, the trained prompt (no words at all), and no thinking

python3 - "$page" "$model" "${MAX_TOKENS:-1024}" >"$scratch/question" 2>"$scratch/error" <<'PYTHON' ||
import base64, json, mimetypes, pathlib, sys
page, model, tokens = sys.argv[1:]
kind = mimetypes.guess_type(page)[0] or "image/png"
url = f"data:{kind};base64," + base64.b64encode(pathlib.Path(page).read_bytes()).decode()
print(json.dumps({
    "model": model,
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
    "max_tokens": int(tokens), "temperature": 0.2, "top_p": 0.9, "seed": 0,
    "chat_template_kwargs": {"enable_thinking": False},
}))
PYTHON
  usage "can't make a question: $(tail -n 1 "$scratch/error")"

ask /v1/chat/completions --max-time "${PATIENCE:-300}" \
  --header 'Content-Type: application/json' --header 'Expect:' --data-binary "@$scratch/question"
case $status in
  200) ;;
  404) failed page "the answer is 404: $(start)" ;;
  413) failed page "the answer is 413: the page is too large for the server or a proxy before it" ;;
  504) failed page "the answer is 504: a proxy did not wait; raise its read timeout (nginx: proxy_read_timeout 300s)" ;;
  *) failed page "the answer is $status: $(start)" ;;
esac
verdict=$(python '
import json, re, sys
answer = json.load(sys.stdin)
choice, usage = answer["choices"][0], answer.get("usage") or {}
text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
wanted = sys.argv[1].split()
found = [word for word in wanted if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
made, read = usage.get("completion_tokens"), usage.get("prompt_tokens")
print(f"{made} tokens of text, {read} of the page, finish_reason {reason}")
for line in text.strip().splitlines()[:5]:
    print("      |", "".join(sign for sign in line[:110] if sign.isprintable()))
if not text.strip():
    sys.exit("the text is empty")
if reason not in ("stop", None):
    sys.exit(f"the text never came to its end (finish_reason {reason}): a degenerate engine, or MAX_TOKENS is too few")
if len(found) * 2 < len(wanted):
    sys.exit(f"only {len(found)} of {len(wanted)} words of the page are in the text ({sys.argv[1]}): it does not read")
' "$words")
code=$?
[ -z "$verdict" ] || printf '%s\n' "$verdict" | sed '1s/^/      /'
if [ $code -ne 0 ]; then
  case $(cat "$scratch/error") in
    *Traceback*) failed page "the answer is no chat completion: $(start)" ;;
    *) failed page "$(cat "$scratch/error")" ;;
  esac
fi
passed page "$page was read${words:+, its words are in the text}"
