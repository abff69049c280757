-- POST the lines of the file named in the first argument, one after the other; tell what was seen as one line of JSON.
function init(args)
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  local requests = {}
  for line in io.lines(args[1]) do
    wrk.body = line
    requests[#requests + 1] = wrk.format()
  end
  if #requests > 1 then
    local last = 0
    request = function()
      last = last % #requests + 1
      return requests[last]
    end
  end
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
