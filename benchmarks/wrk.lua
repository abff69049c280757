-- POST the file named in the first argument, again and again; tell what was seen as one line of JSON.
function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  wrk.headers["content-type"] = "application/json"
  file:close()
end

function done(summary, latency, requests)
  local percentiles = {}
  for percent = 1, 99 do
    percentiles[percent] = string.format("%d", latency:percentile(percent))
  end
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format('{"requests": %d, "duration_us": %d, "failed": %d, "largest_us": %d, "percentiles_us": [%s]}\n',
    summary.requests, summary.duration, failed, latency.max, table.concat(percentiles, ", ")))
end
