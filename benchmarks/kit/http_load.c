/* A load generator for HTTP/1.1 over loopback: one thread, keep-alive, Linux 5.11 or later.
 *
 * Open loop: requests are due at random times (Poisson, --rate), in bursts (--burst every --every seconds), or both,
 * whatever the server does. Each is timed from the moment it was due. A request that finds no idle connection gets a
 * new one; only if --connections are busy it waits here, and its time runs on.
 * Closed loop: each of --clients sends its next request once the last was answered.
 *
 * Only requests due in the measured time count: --seconds, after --warm seconds. Prints one JSON object, described in
 * http_load.py. With --samples FILE, writes a line per request: due, seconds until its answer, status (0: connection
 * broken, -1: unanswered).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { ANSWERED = 200, BUSY = 429, UNAVAILABLE = 503, BROKEN = 0, UNANSWERED = -1 };
enum { CHUNKED = -1, UNTIL_CLOSED = -2 }; /* of Connection.body_left */
enum { MOST_EVENTS = 1024, LAST_CHUNK = 5 };

static const double LOOK_AGAIN_S = 0.01; /* for the end of the time, and for clients whose connection broke */

typedef struct {
  char *bytes;
  size_t length;
} Request;

typedef struct {
  int fd;      /* -1: closed */
  int idle_at; /* its place in `idle`; -1: in use or closed */
  bool connected;
  const Request *request;
  size_t sent;
  double due;
  /* the answer, as far as it has come */
  char head[4096];
  size_t head_length;
  bool in_body, closes, retry_after;
  int status;
  long body_left;        /* bytes, CHUNKED or UNTIL_CLOSED */
  char tail[LAST_CHUNK]; /* the body's last bytes */
} Connection;

typedef struct {
  double due, seconds;
  int status;
} Sample;

typedef struct {
  double *values;
  size_t count, room;
} Values;

static struct {
  int port, clients, burst, connections;
  double rate, every, seconds, warm, drain, slo;
  uint64_t seed;
  const char *path, *bodies, *samples;
} options = {.connections = 8192, .every = 1, .seconds = 10, .warm = 1, .drain = 10, .slo = 1, .seed = 1};

static Request *requests;
static size_t request_count, next_request;
static Connection *connections;
static int *idle, *closed; /* indices of connections; both are used as stacks */
static int idle_count, closed_count, in_use, most_open, events_of;
static int pausing; /* clients of the closed loop whose connections broke; they go on at `pause_ends` */
static double measured_from, sending_until, pause_ends;
static Values waiting; /* when requests were due that found no connection; those before `waiting_first` got one */
static size_t waiting_first;

static Sample *samples;
static size_t sample_count, sample_room;
static long broken_connecting, broken_before, broken_within, with_retry_after, without_connection;
static Values behind; /* seconds from due to sent, of requests for which a connection was free */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static double cpu_seconds(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

/* A number in [0, 1): xorshift64. */
static double uniform(void) {
  static uint64_t state;
  if (!state) state = 88172645463325252ull ^ (options.seed * 0x9E3779B97F4A7C15ull);
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (state >> 11) * (1.0 / 9007199254740992.0);
}

static void *grown(void *array, size_t *room, size_t count, size_t size) {
  if (count < *room) return array;
  *room = *room ? 2 * *room : 4096;
  if (!(array = realloc(array, *room * size))) exit((perror("http_load: memory"), 1));
  return array;
}

static void add(Values *to, double value) {
  to->values = grown(to->values, &to->room, to->count, sizeof value);
  to->values[to->count++] = value;
}

static bool measured(double due) { return due >= measured_from && due < sending_until; }

static void record(double due, double seconds, int status) {
  if (!measured(due)) return;
  samples = grown(samples, &sample_room, sample_count, sizeof *samples);
  samples[sample_count++] = (Sample){due - measured_from, seconds, status};
}

/* --- connections --------------------------------------------------------------------------------------------------- */

static void watch(Connection *c, int operation, uint32_t events) {
  struct epoll_event event = {.events = events, .data.u32 = c - connections};
  epoll_ctl(events_of, operation, c->fd, &event);
}

static void set_idle(Connection *c) {
  c->request = NULL;
  c->idle_at = idle_count;
  idle[idle_count++] = c - connections;
}

static void unset_idle(Connection *c) {
  int last = idle[--idle_count];
  idle[c->idle_at] = last;
  connections[last].idle_at = c->idle_at;
  c->idle_at = -1;
}

static void hang_up(Connection *c) {
  if (c->idle_at >= 0) unset_idle(c);
  close(c->fd);
  c->fd = -1;
  closed[closed_count++] = c - connections;
}

/* Whether the connection could be begun; it may still fail. */
static bool dial(Connection *c) {
  int one = 1;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(options.port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (c->fd < 0) return false;
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  c->connected = connect(c->fd, (struct sockaddr *)&to, sizeof to) == 0;
  if (!c->connected && errno != EINPROGRESS) return close(c->fd), c->fd = -1, false;
  watch(c, EPOLL_CTL_ADD, c->connected ? EPOLLIN : EPOLLIN | EPOLLOUT);
  int open = options.connections - closed_count;
  if (open > most_open) most_open = open;
  return true;
}

/* --- a request and its answer --------------------------------------------------------------------------------------- */

static void end_broken(Connection *c) {
  if (measured(c->due)) (!c->connected ? broken_connecting++ : c->head_length ? broken_within++ : broken_before++);
  record(c->due, now() - c->due, BROKEN);
  in_use--;
  if (!pausing++) pause_ends = now() + LOOK_AGAIN_S;
  hang_up(c);
}

static void end_answered(Connection *c) {
  record(c->due, now() - c->due, c->status);
  if (measured(c->due) && c->status != ANSWERED && c->retry_after) with_retry_after++;
  in_use--;
  c->closes || c->sent < c->request->length ? hang_up(c) : set_idle(c); /* answered before it had read everything? */
}

static void send_rest(Connection *c) {
  while (c->sent < c->request->length) {
    ssize_t count = send(c->fd, c->request->bytes + c->sent, c->request->length - c->sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EAGAIN) return watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    if (count < 0) return; /* reading tells what the server said before it hung up */
    c->sent += count;
  }
}

/* Send the next request, on an idle connection or a new one. False if there is none. */
static bool begin(double due) {
  Connection *c;
  if (idle_count) {
    c = &connections[idle[idle_count - 1]];
    unset_idle(c);
  } else if (closed_count) {
    c = &connections[closed[--closed_count]];
  } else {
    return false;
  }
  c->due = due, c->sent = 0, c->head_length = 0, c->in_body = false, c->retry_after = false;
  c->request = &requests[next_request++ % request_count];
  in_use++;
  if (c->fd < 0 && !dial(c)) {
    broken_connecting += measured(due);
    record(due, now() - due, BROKEN);
    in_use--;
    closed[closed_count++] = c - connections;
    return true;
  }
  if (c->connected) send_rest(c);
  return true;
}

/* The value of a header in c->head, or NULL. `name`: with the line break before it and the colon, in lower case. */
static const char *header(Connection *c, const char *name) {
  const char *at = strcasestr(c->head, name);
  if (!at) return NULL;
  for (at += strlen(name); *at == ' '; at++) continue;
  return at;
}

static void read_head(Connection *c) {
  const char *length = header(c, "\r\ncontent-length:"), *coding = header(c, "\r\ntransfer-encoding:");
  const char *connection = header(c, "\r\nconnection:");
  c->status = strlen(c->head) > 9 ? atoi(c->head + 9) : 0;
  c->in_body = true;
  c->closes = (connection && !strncasecmp(connection, "close", 5)) || !strncmp(c->head, "HTTP/1.0", 8);
  c->retry_after = header(c, "\r\nretry-after:") != NULL;
  c->body_left = length ? atol(length) : coding && !strncasecmp(coding, "chunked", 7) ? CHUNKED : UNTIL_CLOSED;
  if (c->status == 204 || c->status == 304) c->body_left = 0;
  if (c->body_left == UNTIL_CLOSED) c->closes = true;
  memset(c->tail, 0, sizeof c->tail);
}

/* Take in what was received. Returns whether the answer is whole. Sets `head_length` beyond its room if it is no HTTP. */
static bool take_in(Connection *c, const char *bytes, size_t count) {
  if (!c->in_body) {
    size_t before = c->head_length, room = sizeof c->head - 1 - before, taken = count < room ? count : room;
    memcpy(c->head + before, bytes, taken);
    c->head_length += taken;
    c->head[c->head_length] = 0;
    char *end = memmem(c->head, c->head_length, "\r\n\r\n", 4);
    if (!end) return false;
    size_t used = end + 4 - c->head - before;
    *end = 0;
    read_head(c);
    bytes += used, count -= used;
  }
  if (c->body_left >= 0) return (c->body_left -= count) <= 0;
  size_t kept = count < LAST_CHUNK ? LAST_CHUNK - count : 0;
  memmove(c->tail, c->tail + LAST_CHUNK - kept, kept);
  memcpy(c->tail + kept, bytes + count - (LAST_CHUNK - kept), LAST_CHUNK - kept);
  return c->body_left == CHUNKED && !memcmp(c->tail, "0\r\n\r\n", LAST_CHUNK);
}

static void receive(Connection *c) {
  static char bytes[1 << 16];
  for (;;) {
    ssize_t count = recv(c->fd, bytes, sizeof bytes, 0);
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      if (!c->request) return hang_up(c); /* an idle connection that the server closed */
      bool whole = count == 0 && c->in_body && c->body_left == UNTIL_CLOSED;
      return whole ? end_answered(c) : end_broken(c);
    }
    if (!c->request) return hang_up(c); /* nothing was asked */
    if (take_in(c, bytes, count)) return end_answered(c);
    if (!c->in_body && c->head_length == sizeof c->head - 1) return end_broken(c);
    if (count < (ssize_t)sizeof bytes) return; /* the rest has not come yet; epoll will say */
  }
}

static void handle(const struct epoll_event *event) {
  Connection *c = &connections[event->data.u32];
  if (c->fd < 0) return;
  if (event->events & EPOLLOUT) {
    c->connected = c->connected || !(event->events & (EPOLLERR | EPOLLHUP));
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
    if (c->request && c->connected) send_rest(c);
  }
  if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
}

/* --- when requests are sent ----------------------------------------------------------------------------------------- */

static double next_single = INFINITY, next_burst = INFINITY;

static double next_due(void) { return fmin(next_single, next_burst); }

/* Put requests that have become due behind those that wait, then send as many as connections allow. */
static void send_due(double until) {
  double due;
  while ((due = next_due()) <= until && due < sending_until) {
    bool single = due == next_single;
    for (int left = single ? 1 : options.burst; left; left--) {
      if (waiting_first == waiting.count && begin(due)) {
        if (measured(due)) add(&behind, now() - due);
      } else {
        without_connection += measured(due);
        add(&waiting, due);
      }
    }
    if (single) next_single -= log(1 - uniform()) / options.rate;
    else next_burst += options.every;
  }
  while (waiting_first < waiting.count && begin(waiting.values[waiting_first])) waiting_first++;
}

/* Let every idle client send, unless it pauses. */
static void send_closed(double time) {
  if (time >= pause_ends) pausing = 0;
  for (int left = options.clients - in_use - pausing; left > 0; left--) begin(time);
}

/* Send until `sending_until`, then wait for the answers; returns the CPU seconds used while sending. */
static double run(void) {
  static struct epoll_event events[MOST_EVENTS];
  double cpu_before = cpu_seconds(), cpu_used = -1;
  for (;;) {
    double time = now(), wait = LOOK_AGAIN_S;
    bool sending = time < sending_until;
    if (!sending && cpu_used < 0) cpu_used = cpu_seconds() - cpu_before;
    if (options.clients && sending) send_closed(time);
    if (!options.clients) {
      send_due(time);
      if (sending) wait = fmin(wait, fmax(0, next_due() - now()));
    }
    bool nothing_left = !in_use && waiting_first == waiting.count;
    if (!sending && (nothing_left || time > sending_until + options.drain)) return cpu_used;
    struct timespec most = {.tv_nsec = (long)(wait * 1e9)};
    int count = epoll_pwait2(events_of, events, MOST_EVENTS, &most, NULL);
    for (int number = 0; number < count; number++) handle(&events[number]);
  }
}

/* --- what was seen -------------------------------------------------------------------------------------------------- */

static int by_size(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

/* Sorts. Prints null for each if there are no values. */
static void print_ms(const char *name, Values *of) {
  const struct { const char *name; double share; } all[] = {{"p50", .5}, {"p90", .9}, {"p99", .99}, {"max", 1}};
  if (of->count) qsort(of->values, of->count, sizeof *of->values, by_size);
  printf("\"%s\": {", name);
  for (size_t number = 0; number < 4; number++) {
    printf("%s\"%s\": ", number ? ", " : "", all[number].name);
    if (of->count) printf("%.3f", 1000 * of->values[(size_t)fmax(0, ceil(all[number].share * of->count) - 1)]);
    else printf("null");
  }
  printf("}, ");
}

static void print_found(double cpu_used) {
  static long by_status[1000];
  Values answers = {0}, refusals = {0};
  long in_time = 0, late = 0, broken = 0, unanswered = 0;
  double worst = 0;
  FILE *file = options.samples ? fopen(options.samples, "w") : NULL;
  if (options.samples && !file) exit((perror(options.samples), 2));
  for (const Sample *one = samples; one < samples + sample_count; one++) {
    if (file) fprintf(file, "%.6f %.6f %d\n", one->due, one->seconds, one->status);
    if (one->status == UNANSWERED) unanswered++;
    else if (one->status <= BROKEN || one->status > 999) broken++;
    else by_status[one->status]++;
    if (one->status == ANSWERED) {
      add(&answers, one->seconds);
      one->seconds <= options.slo ? in_time++ : late++;
      worst = fmax(worst, one->seconds - options.slo);
    } else if (one->status > BROKEN) {
      add(&refusals, one->seconds);
    }
  }
  if (file && fclose(file)) exit((perror(options.samples), 2));
  printf("{\"seconds\": %g, \"requests\": %zu, \"offered_s\": %.2f, \"answered\": %ld, ", options.seconds, sample_count,
         sample_count / options.seconds, by_status[ANSWERED]);
  printf("\"in_time\": %ld, \"in_time_s\": %.2f, \"late\": %ld, \"late_worst_s\": %.3f, ", in_time,
         in_time / options.seconds, late, worst);
  printf("\"refused_429\": %ld, \"refused_503\": %ld, \"with_retry_after\": %ld, \"other\": {", by_status[BUSY],
         by_status[UNAVAILABLE], with_retry_after);
  by_status[ANSWERED] = by_status[BUSY] = by_status[UNAVAILABLE] = 0;
  for (int status = 1, first = 1; status < 1000; status++) {
    if (by_status[status]) printf("%s\"%d\": %ld", first ? "" : ", ", status, by_status[status]), first = 0;
  }
  printf("}, \"broken\": %ld, \"broken_connecting\": %ld, \"broken_before_answer\": %ld, \"broken_in_answer\": %ld, ",
         broken, broken_connecting, broken_before, broken_within);
  printf("\"unanswered\": %ld, ", unanswered);
  print_ms("answer_ms", &answers);
  print_ms("refusal_ms", &refusals);
  print_ms("behind_ms", &behind);
  printf("\"without_connection\": %ld, \"connections\": %d, \"client_cpu_s\": %.3f, \"client_cores\": %.4f}\n",
         without_connection, most_open, cpu_used, cpu_used / (options.warm + options.seconds));
}

/* --- start ---------------------------------------------------------------------------------------------------------- */

static void read_options(int count, char **words) {
  for (int at = 1; at < count; at += 2) {
    const char *key = words[at], *value = at + 1 < count ? words[at + 1] : "";
    if (!strcmp(key, "--port")) options.port = atoi(value);
    else if (!strcmp(key, "--path")) options.path = value;
    else if (!strcmp(key, "--bodies")) options.bodies = value;
    else if (!strcmp(key, "--rate")) options.rate = atof(value);
    else if (!strcmp(key, "--burst")) options.burst = atoi(value);
    else if (!strcmp(key, "--every")) options.every = atof(value);
    else if (!strcmp(key, "--clients")) options.clients = atoi(value);
    else if (!strcmp(key, "--seconds")) options.seconds = atof(value);
    else if (!strcmp(key, "--warm")) options.warm = atof(value);
    else if (!strcmp(key, "--drain")) options.drain = atof(value);
    else if (!strcmp(key, "--slo")) options.slo = atof(value);
    else if (!strcmp(key, "--connections")) options.connections = atoi(value);
    else if (!strcmp(key, "--seed")) options.seed = strtoull(value, NULL, 10);
    else if (!strcmp(key, "--samples")) options.samples = value;
    else exit((fprintf(stderr, "http_load: unknown option %s\n", key), 2));
  }
  bool open = options.rate > 0 || options.burst > 0;
  if (!options.port || !options.path || !options.bodies || open == (options.clients > 0) || options.every <= 0) {
    fprintf(stderr, "http_load --port P --path /route --bodies FILE (--clients N | [--rate R] [--burst N --every S]) "
                    "[--seconds S] [--warm S] [--drain S] [--slo S] [--connections N] [--seed N] [--samples FILE]\n");
    exit(2);
  }
}

static void read_bodies(void) {
  FILE *file = fopen(options.bodies, "r");
  char *line = NULL;
  size_t room = 0, requests_room = 0;
  ssize_t length;
  if (!file) exit((perror(options.bodies), 2));
  while ((length = getline(&line, &room, file)) > 0) {
    while (length && isspace((unsigned char)line[length - 1])) length--;
    if (!length) continue;
    requests = grown(requests, &requests_room, request_count, sizeof *requests);
    Request *one = &requests[request_count++];
    one->length = asprintf(&one->bytes,
                           "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                           "Content-Length: %zd\r\n\r\n%.*s",
                           options.path, options.port, length, (int)length, line);
  }
  free(line);
  fclose(file);
  if (!request_count) exit((fprintf(stderr, "http_load: %s has no bodies\n", options.bodies), 2));
}

/* As many connections as there may be, all closed; those of a burst or of clients are opened now. */
static void make_connections(void) {
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if ((rlim_t)options.connections + 16 > files.rlim_cur) options.connections = files.rlim_cur - 16;
  if (options.clients > options.connections) options.clients = options.connections;
  connections = calloc(options.connections, sizeof *connections);
  idle = calloc(options.connections, sizeof *idle);
  closed = calloc(options.connections, sizeof *closed);
  if (!connections || !idle || !closed) exit((perror("http_load: memory"), 1));
  for (int number = options.connections - 1; number >= 0; number--) {
    connections[number].fd = connections[number].idle_at = -1;
    closed[closed_count++] = number;
  }
  events_of = epoll_create1(EPOLL_CLOEXEC);
  for (int left = options.burst; left && closed_count; left--) {
    Connection *c = &connections[closed[--closed_count]];
    if (!dial(c)) { closed[closed_count++] = c - connections; break; }
    set_idle(c);
  }
}

int main(int count, char **words) {
  read_options(count, words);
  read_bodies();
  make_connections();
  double started = now() + 0.05;
  measured_from = started + options.warm;
  sending_until = measured_from + options.seconds - 1e-6; /* a burst at the very end is not sent, as rounding may be */
  if (options.rate > 0) next_single = started - log(1 - uniform()) / options.rate;
  if (options.burst > 0) next_burst = measured_from;
  double cpu_used = run();
  for (int number = 0; number < options.connections; number++) {
    if (connections[number].fd >= 0 && connections[number].request) {
      record(connections[number].due, now() - connections[number].due, UNANSWERED);
    }
  }
  for (; waiting_first < waiting.count; waiting_first++) {
    record(waiting.values[waiting_first], now() - waiting.values[waiting_first], UNANSWERED);
  }
  print_found(cpu_used);
  return 0;
}
