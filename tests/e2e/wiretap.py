"""Stands between a client and the service, passes everything on, and keeps what the client asked."""

import http.client
import http.server
import json
import threading

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


class Wiretap:
    """`asked`: (path, JSON body) of each POST, in the order of arrival."""

    def __init__(self, service):
        self.asked = []
        tap = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                tap.asked.append((self.path, json.loads(body)))
                upstream = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
                upstream.request("POST", self.path, body, dict(self.headers))
                answer = upstream.getresponse()
                content = answer.read()
                upstream.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
