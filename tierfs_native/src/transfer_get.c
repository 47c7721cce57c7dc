#define _GNU_SOURCE
#include "transfer_get.h"

#include "transfer.h"
#include "transfer_reply.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define THREADS_MAX 256u
#define FILE_MODE 0600

struct worker {
    struct tierfs_getter *getter;
    pthread_t thread;
    int connection; /* or -1; written under the lock, since the closing thread shuts it down */
    char head[TIERFS_REPLY_HEAD_BYTES];
};

struct tierfs_getter {
    pthread_mutex_t lock; /* guards all below but the settings */
    pthread_cond_t changed;
    struct tierfs_get *waiting, **waiting_end;
    unsigned waiting_count, idle_count, worker_count;
    struct tierfs_get *done, **done_end;
    bool stopping;
    int event;
    char *host, *port;
    int connect_timeout_ms, timeout_ms;
    unsigned worker_limit;
    struct worker *workers[];
};

/* -- a connection -- */

static void set_limit(int connection, int option, int limit_ms)
{
    const struct timeval limit = {.tv_sec = limit_ms / 1000, .tv_usec = limit_ms % 1000 * 1000};

    (void)setsockopt(connection, SOL_SOCKET, option, &limit, sizeof limit);
}

static void disconnect(struct worker *worker)
{
    pthread_mutex_lock(&worker->getter->lock);
    int connection = worker->connection;
    worker->connection = -1;
    pthread_mutex_unlock(&worker->getter->lock);
    if (connection >= 0)
        close(connection);
}

/* From here on the closing thread can break off what is waited for on that connection. 0 or -errno. */
static int take_over(struct worker *worker, int connection)
{
    pthread_mutex_lock(&worker->getter->lock);
    bool stopping = worker->getter->stopping;
    if (!stopping)
        worker->connection = connection;
    pthread_mutex_unlock(&worker->getter->lock);
    if (!stopping)
        return 0;
    close(connection);
    return -ECANCELED;
}

static int connect_to(struct worker *worker, const struct addrinfo *address)
{
    const struct tierfs_getter *getter = worker->getter;
    const int on = 1;
    int connection = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, address->ai_protocol);
    int result = connection < 0 ? -errno : take_over(worker, connection);

    if (result < 0)
        return result;
    set_limit(connection, SO_SNDTIMEO, getter->connect_timeout_ms);
    if (connect(connection, address->ai_addr, address->ai_addrlen) < 0) {
        result = -errno;
        disconnect(worker);
        return result;
    }
    set_limit(connection, SO_SNDTIMEO, getter->timeout_ms);
    set_limit(connection, SO_RCVTIMEO, getter->timeout_ms);
    (void)setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return 0;
}

/* 0 or -errno. *kept: it has carried a request before. */
static int have_connection(struct worker *worker, bool *kept)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    struct addrinfo *found = NULL;
    int result = -EHOSTUNREACH;
    char byte;

    /* Nothing was asked for: what can be read now is the end, as a rule. */
    *kept = worker->connection >= 0 && recv(worker->connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
            errno == EAGAIN;
    if (*kept)
        return 0;
    disconnect(worker);
    if (getaddrinfo(worker->getter->host, worker->getter->port, &hints, &found) != 0)
        return result;
    for (const struct addrinfo *address = found; address != NULL && result < 0 && result != -ECANCELED;
         address = address->ai_next)
        result = connect_to(worker, address);
    freeaddrinfo(found);
    return result;
}

static int send_all(int connection, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t count = send(connection, data, bytes, MSG_NOSIGNAL);

        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        data += count;
        bytes -= (size_t)count;
    }
    return 0;
}

/* -- a get -- */

/* The head of the reply, and what has come with it (*come bytes in all). Its size, or -errno. */
static long receive_head(struct worker *worker, const struct tierfs_get *get, size_t *come, bool *keeps_open)
{
    const struct tierfs_reply_wanted wanted = {
        .offset = get->offset, .length = get->length, .etag = get->etag, .etag_bytes = get->etag_bytes};
    long head = 0;

    *come = 0;
    while (head == 0) {
        ssize_t count = recv(worker->connection, worker->head + *come, sizeof worker->head - *come, 0);

        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        if (count == 0)
            return -ECONNRESET;
        *come += (size_t)count;
        head = tierfs_reply_check(worker->head, *come, &wanted, keeps_open);
    }
    return head;
}

static int receive_body(struct worker *worker, const struct tierfs_get *get, const char *head, size_t bytes)
{
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (get->create ? O_CREAT : 0);
    struct tierfs_transfer_result result;
    struct tierfs_transfer transfer = {
        .source = worker->connection,
        .target_offset = get->target_offset,
        .length = get->length,
        .head = head,
        .head_bytes = bytes,
        .waits = true,
        .body = get->body,
    };

    if (bytes > get->length)
        return -EPROTO; /* nothing else was asked for */
    transfer.target = open(get->path, flags, FILE_MODE);
    if (transfer.target < 0)
        return -errno;
    tierfs_transfer(&transfer, get->sums, &result);
    if (close(transfer.target) < 0 && result.target_errno == 0)
        result.target_errno = errno;
    if (result.target_errno != 0)
        return -result.target_errno;
    if (result.source_errno != 0)
        return -result.source_errno;
    return result.received == get->length ? 0 : -ECONNRESET;
}

/* One try. *again: the connection had been closed by the other side before it saw the request, as far as we know. */
static int try_get(struct worker *worker, const struct tierfs_get *get, bool *again)
{
    bool keeps_open = false;
    size_t come = 0;
    bool kept;
    int result = have_connection(worker, &kept);

    *again = false;
    if (result < 0)
        return result;
    result = send_all(worker->connection, get->request, get->request_bytes);
    long head = result < 0 ? result : receive_head(worker, get, &come, &keeps_open);
    if (head < 0) {
        disconnect(worker);
        *again = kept && come == 0 && (head == -ECONNRESET || head == -EPIPE);
        return (int)head;
    }
    result = receive_body(worker, get, worker->head + head, come - (size_t)head);
    if (result < 0 || !keeps_open)
        disconnect(worker);
    return result;
}

static void do_get(struct worker *worker, struct tierfs_get *get)
{
    bool again;
    int result = try_get(worker, get, &again);

    if (again)
        result = try_get(worker, get, &again);
    get->result = -result;
}

/* -- threads -- */

/* Under the lock. */
static struct tierfs_get *next_waiting(struct tierfs_getter *getter)
{
    getter->idle_count++;
    while (getter->waiting == NULL && !getter->stopping)
        pthread_cond_wait(&getter->changed, &getter->lock);
    getter->idle_count--;
    if (getter->stopping)
        return NULL;
    struct tierfs_get *get = getter->waiting;
    getter->waiting = get->next;
    if (getter->waiting == NULL)
        getter->waiting_end = &getter->waiting;
    getter->waiting_count--;
    return get;
}

static void *work(void *context)
{
    struct worker *worker = context;
    struct tierfs_getter *getter = worker->getter;
    struct tierfs_get *get;
    const uint64_t one = 1;

    pthread_mutex_lock(&getter->lock);
    while ((get = next_waiting(getter)) != NULL) {
        pthread_mutex_unlock(&getter->lock);
        do_get(worker, get);
        pthread_mutex_lock(&getter->lock);
        bool is_first = getter->done == NULL;
        get->next = NULL;
        *getter->done_end = get;
        getter->done_end = &get->next;
        /* The counter cannot overflow: who takes them reads it first. */
        if (is_first)
            (void)!write(getter->event, &one, sizeof one);
    }
    pthread_mutex_unlock(&getter->lock);
    disconnect(worker);
    return NULL;
}

/* Under the lock. Returns 0 or -errno. */
static int start_worker(struct tierfs_getter *getter)
{
    struct worker *worker = calloc(1, sizeof *worker);

    if (worker == NULL)
        return -ENOMEM;
    worker->getter = getter;
    worker->connection = -1;
    int error = pthread_create(&worker->thread, NULL, work, worker);
    if (error != 0) {
        free(worker);
        return -error;
    }
    getter->workers[getter->worker_count++] = worker;
    return 0;
}

/* -- for the owner -- */

static void discard(struct tierfs_getter *getter)
{
    if (getter->event >= 0)
        close(getter->event);
    pthread_cond_destroy(&getter->changed);
    pthread_mutex_destroy(&getter->lock);
    free(getter->host);
    free(getter->port);
    free(getter);
}

int tierfs_getter_open(const struct tierfs_getter_settings *settings, struct tierfs_getter **getter)
{
    struct tierfs_getter *made;
    int result = 0;

    if (settings->threads == 0 || settings->threads > THREADS_MAX)
        return -EINVAL;
    made = calloc(1, sizeof *made + settings->threads * sizeof made->workers[0]);
    if (made == NULL)
        return -ENOMEM;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    made->waiting_end = &made->waiting;
    made->done_end = &made->done;
    made->worker_limit = settings->threads;
    made->connect_timeout_ms = settings->connect_timeout_ms;
    made->timeout_ms = settings->timeout_ms;
    made->host = strdup(settings->host);
    made->port = strdup(settings->port);
    made->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->event < 0)
        result = -errno;
    else if (made->host == NULL || made->port == NULL)
        result = -ENOMEM;
    if (result < 0)
        discard(made);
    else
        *getter = made;
    return result;
}

int tierfs_getter_descriptor(const struct tierfs_getter *getter)
{
    return getter->event;
}

int tierfs_getter_submit(struct tierfs_getter *getter, struct tierfs_get *get)
{
    int result = 0;

    pthread_mutex_lock(&getter->lock);
    if (getter->idle_count <= getter->waiting_count && getter->worker_count < getter->worker_limit) {
        result = start_worker(getter);
        if (getter->worker_count > 0)
            result = 0; /* some other will have time */
    }
    if (result == 0) {
        get->next = NULL;
        *getter->waiting_end = get;
        getter->waiting_end = &get->next;
        getter->waiting_count++;
        pthread_cond_signal(&getter->changed);
    }
    pthread_mutex_unlock(&getter->lock);
    return result;
}

struct tierfs_get *tierfs_getter_take(struct tierfs_getter *getter)
{
    uint64_t count;

    (void)!read(getter->event, &count, sizeof count); /* EAGAIN: taken already, by a call before */
    pthread_mutex_lock(&getter->lock);
    struct tierfs_get *done = getter->done;
    getter->done = NULL;
    getter->done_end = &getter->done;
    pthread_mutex_unlock(&getter->lock);
    return done;
}

struct tierfs_get *tierfs_getter_close(struct tierfs_getter *getter)
{
    pthread_mutex_lock(&getter->lock);
    getter->stopping = true;
    for (unsigned i = 0; i < getter->worker_count; i++)
        if (getter->workers[i]->connection >= 0)
            (void)shutdown(getter->workers[i]->connection, SHUT_RDWR);
    pthread_cond_broadcast(&getter->changed);
    pthread_mutex_unlock(&getter->lock);
    for (unsigned i = 0; i < getter->worker_count; i++) {
        (void)pthread_join(getter->workers[i]->thread, NULL);
        free(getter->workers[i]);
    }
    *getter->done_end = getter->waiting;
    struct tierfs_get *left = getter->done;
    discard(getter);
    return left;
}
