"""An OTLP collector for tests: receives spans over gRPC as OpenTelemetry's messages."""

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector: a gRPC server that keeps what arrives."""

    def __init__(self):
        self.requests = []
        self.server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request, context):  # noqa: N802 - gRPC's name
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def all_spans(self):
        """(span, the attributes of the resource that it came from)."""
        return [
            (span, attributes(resource.resource))
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def spans(self, trace):
        """The spans of one trace by name, and the resources that they came from."""
        found, resources = {}, []
        for span, resource in self.all_spans:
            if span.trace_id.hex() == trace:
                found.setdefault(span.name, []).append(span)
                resources.append(resource)
        return found, resources

    def wait_for(self, trace, *names):
        ends = time.monotonic() + 30
        while not set(names) <= set(self.spans(trace)[0]):
            assert time.monotonic() < ends, f"of {names} came {list(self.spans(trace)[0])}"
            time.sleep(0.1)
        return self.spans(trace)


def attributes(thing):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in thing.attributes}
