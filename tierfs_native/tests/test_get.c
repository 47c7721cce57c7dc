/* GETs by threads: many at once, answers that break off, and an end in the middle. What may be answered: test_reply.c. */
#include "transfer_get.h"

#include "batch_index.h"
#include "batch_sum.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define GETS 200u
#define LENGTH (TIERFS_BLOCK_BYTES + 3000)
#define LIMIT_MS 60000

struct server {
    int listening;
    char port[8];
    atomic_uint requests;
    unsigned broken; /* each so many-th answer breaks off; 0: none */
    atomic_bool silent;
};

struct job {
    struct tierfs_get get; /* first */
    unsigned number;
    char request[64];
    uint64_t sums[2];
    char body[LENGTH];
};

static char byte_at(uint64_t offset)
{
    return (char)(offset * 7 + offset / 1000);
}

static void send_all(int connection, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t count = send(connection, data, bytes, MSG_NOSIGNAL);
        if (count <= 0)
            return;
        data += count;
        bytes -= (size_t)count;
    }
}

struct visitor {
    struct server *server;
    int connection;
};

/* Requests are "GET OFFSET" and an empty line, one at a time. */
static void *serve(void *context)
{
    struct visitor visitor = *(struct visitor *)context;
    char asked[256], head[256], *data = malloc(LENGTH);

    free(context);
    assert(data != NULL);
    for (;;) {
        ssize_t bytes = recv(visitor.connection, asked, sizeof asked - 1, 0);
        if (bytes <= 0)
            break;
        asked[bytes] = '\0';
        assert(strcmp(asked + bytes - 4, "\r\n\r\n") == 0);
        const unsigned long offset = strtoul(asked + 4, NULL, 10);
        const unsigned number = atomic_fetch_add(&visitor.server->requests, 1) + 1;
        if (atomic_load(&visitor.server->silent))
            continue;
        for (size_t at = 0; at < LENGTH; at++)
            data[at] = byte_at(offset + at);
        int used = snprintf(
            head, sizeof head,
            "HTTP/1.1 206 OK\r\nETag: \"e\"\r\nContent-Length: %zu\r\nContent-Range: bytes %lu-%lu/*\r\n\r\n",
            (size_t)LENGTH, offset, offset + LENGTH - 1);
        bool breaks = visitor.server->broken != 0 && number % visitor.server->broken == 0;
        send_all(visitor.connection, head, (size_t)used);
        send_all(visitor.connection, data, breaks ? LENGTH / 2 : LENGTH);
        if (breaks)
            break;
    }
    close(visitor.connection);
    free(data);
    return NULL;
}

static void *accept_all(void *context)
{
    struct server *server = context;
    pthread_t thread;
    int connection;

    while ((connection = accept(server->listening, NULL, NULL)) >= 0) {
        struct visitor *visitor = malloc(sizeof *visitor);
        assert(visitor != NULL);
        *visitor = (struct visitor){server, connection};
        assert(pthread_create(&thread, NULL, serve, visitor) == 0);
        pthread_detach(thread);
    }
    return NULL;
}

static void start_server(struct server *server, pthread_t *thread)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;

    server->listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert(server->listening >= 0);
    assert(bind(server->listening, (struct sockaddr *)&address, sizeof address) == 0);
    assert(listen(server->listening, 64) == 0);
    assert(getsockname(server->listening, (struct sockaddr *)&address, &bytes) == 0);
    snprintf(server->port, sizeof server->port, "%u", ntohs(address.sin_port));
    assert(pthread_create(thread, NULL, accept_all, server) == 0);
}

static struct job *make_job(unsigned number, const char *path, bool wants_body)
{
    struct job *job = calloc(1, sizeof *job);

    assert(job != NULL);
    job->number = number;
    int used = snprintf(job->request, sizeof job->request, "GET %u\r\n\r\n", number * 100);
    job->get = (struct tierfs_get){
        .request = job->request,
        .request_bytes = (size_t)used,
        .offset = number * 100,
        .length = LENGTH,
        .etag = "e",
        .etag_bytes = 1,
        .path = path,
        .create = true,
        .target_offset = number * (uint64_t)LENGTH,
        .sums = job->sums,
        .body = wants_body ? job->body : NULL,
    };
    return job;
}

static void check(const struct job *job, int file)
{
    char *data = malloc(LENGTH);

    assert(data != NULL);
    assert(pread(file, data, LENGTH, (off_t)job->get.target_offset) == (ssize_t)LENGTH);
    for (size_t at = 0; at < LENGTH; at++)
        assert(data[at] == byte_at(job->get.offset + at));
    assert(job->get.body == NULL || memcmp(job->body, data, LENGTH) == 0);
    assert(job->sums[0] == tierfs_block_sum(data, TIERFS_BLOCK_BYTES));
    assert(job->sums[1] == tierfs_block_sum(data + TIERFS_BLOCK_BYTES, LENGTH - TIERFS_BLOCK_BYTES));
    free(data);
}

static struct tierfs_getter *open_getter(const struct server *server)
{
    const struct tierfs_getter_settings settings = {.host = "127.0.0.1",
                                                    .port = server->port,
                                                    .threads = 6,
                                                    .connect_timeout_ms = LIMIT_MS,
                                                    .timeout_ms = LIMIT_MS};
    struct tierfs_getter *getter;

    assert(tierfs_getter_open(&settings, &getter) == 0);
    return getter;
}

static void test_many(struct server *server, const char *path)
{
    struct tierfs_getter *getter = open_getter(server);
    struct pollfd ready = {.fd = tierfs_getter_descriptor(getter), .events = POLLIN};
    unsigned right = 0, wrong = 0;

    for (unsigned i = 0; i < GETS; i++)
        assert(tierfs_getter_submit(getter, &make_job(i, path, i % 2 == 0)->get) == 0);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert(file >= 0);
    while (right + wrong < GETS) {
        assert(poll(&ready, 1, LIMIT_MS) == 1);
        for (struct tierfs_get *get = tierfs_getter_take(getter), *next; get != NULL; get = next) {
            next = get->next;
            if (get->result == 0)
                check((struct job *)(void *)get, file);
            right += get->result == 0;
            wrong += get->result == ECONNRESET;
            free(get);
        }
    }
    assert(server->broken == 0 ? wrong == 0 : wrong > 0 && right > 0);
    assert(tierfs_getter_close(getter) == NULL);
    close(file);
}

/* All that was submitted comes back, whatever became of it. */
static void test_an_end_in_the_middle(struct server *server, const char *path)
{
    struct tierfs_getter *getter = open_getter(server);
    const unsigned before = atomic_load(&server->requests);
    unsigned count = 0;

    atomic_store(&server->silent, true);
    for (unsigned i = 0; i < GETS; i++)
        assert(tierfs_getter_submit(getter, &make_job(i, path, true)->get) == 0);
    while (atomic_load(&server->requests) < before + 6)
        assert(usleep(1000) == 0);
    for (struct tierfs_get *get = tierfs_getter_close(getter), *next; get != NULL; get = next, count++) {
        next = get->next;
        free(get);
    }
    assert(count == GETS);
    atomic_store(&server->silent, false);
}

int main(void)
{
    static struct server server;
    const char *base = getenv("TMPDIR");
    pthread_t thread;
    char path[512];

    snprintf(path, sizeof path, "%s/tierfs-get-XXXXXX", base != NULL ? base : "/tmp");
    int made = mkstemp(path);
    assert(made >= 0);
    close(made);
    start_server(&server, &thread);
    test_many(&server, path);
    test_an_end_in_the_middle(&server, path);
    server.broken = 7;
    test_many(&server, path);
    assert(shutdown(server.listening, SHUT_RDWR) == 0);
    assert(pthread_join(thread, NULL) == 0);
    close(server.listening);
    unlink(path);
    return 0;
}
