/* Packets between front and engine: bodies, descriptors, ends, and what another version or a stranger would send. */
#include "channel.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static struct tierfs_packet packet;

static void make_pair(int pair[2])
{
    int bytes = 1 << 20;

    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    assert(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
}

static void send_raw(int socket, const void *data, size_t bytes, const int *descriptors, size_t count)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(16 * sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)(uintptr_t)data, bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    if (count != 0) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        first->cmsg_level = SOL_SOCKET;
        first->cmsg_type = SCM_RIGHTS;
        first->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(first), descriptors, count * sizeof(int));
    }
    assert(sendmsg(socket, &message, 0) == (ssize_t)bytes);
}

/* The number that the next descriptor will get: unchanged if none was left open. */
static int next_descriptor(void)
{
    int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);

    assert(descriptor >= 0);
    close(descriptor);
    return descriptor;
}

static void test_round_trip(void)
{
    static char body[TIERFS_CHANNEL_MAX_BYTES + 1];
    const size_t sizes[] = {0, 1, 100, TIERFS_CHANNEL_MAX_BYTES};
    int pair[2];

    make_pair(pair);
    for (size_t i = 0; i < sizeof body; i++)
        body[i] = (char)(i * 7);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        assert(tierfs_channel_send(pair[0], TIERFS_COUNTS, 77 + i, body, sizes[i], 0) == 0);
        assert(tierfs_channel_receive(pair[1], &packet, 0) == 1);
        assert(packet.header.kind == TIERFS_COUNTS && packet.header.value == 77 + i);
        assert(packet.header.body_bytes == sizes[i] && packet.descriptor == -1);
        assert(memcmp(packet.body, body, sizes[i]) == 0);
    }
    assert(tierfs_channel_send(pair[0], TIERFS_COUNTS, 0, body, sizeof body, 0) == -EMSGSIZE);
    assert(tierfs_channel_receive(pair[1], &packet, MSG_DONTWAIT) == -EAGAIN);
    close(pair[0]);
    assert(tierfs_channel_receive(pair[1], &packet, MSG_DONTWAIT) == 0);
    assert(tierfs_channel_send(pair[1], TIERFS_COUNTS, 0, NULL, 0, 0) == -EPIPE);
    close(pair[1]);
}

static void test_full(void)
{
    static char body[TIERFS_CHANNEL_MAX_BYTES];
    int result;
    int pair[2];

    make_pair(pair);
    do
        result = tierfs_channel_send(pair[0], TIERFS_COUNTS, 0, body, sizeof body, MSG_DONTWAIT);
    while (result == 0);
    assert(result == -EAGAIN);
    close(pair[0]);
    close(pair[1]);
}

static void test_the_end_with_something_unread(void)
{
    int pair[2];

    make_pair(pair);
    assert(tierfs_channel_send(pair[0], TIERFS_GONE, 0, NULL, 0, 0) == 0);
    close(pair[1]); /* ECONNRESET for the other end */
    assert(tierfs_channel_receive(pair[0], &packet, 0) == 0);
    close(pair[0]);
}

static void test_descriptors(void)
{
    const struct tierfs_channel_header good = {
        .version = TIERFS_CHANNEL_VERSION, .kind = TIERFS_BACKING, .value = 5};
    struct tierfs_channel_header bad = good;
    int descriptors[16];
    int pair[2];

    make_pair(pair);
    for (int i = 0; i < 16; i++)
        assert((descriptors[i] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0);
    int next = next_descriptor();
    send_raw(pair[0], &good, sizeof good, descriptors, 1);
    assert(tierfs_channel_receive(pair[1], &packet, 0) == 1);
    assert(packet.descriptor == next && (fcntl(packet.descriptor, F_GETFD) & FD_CLOEXEC) != 0);
    close(packet.descriptor);
    send_raw(pair[0], &good, sizeof good, descriptors, 3); /* one is wanted, the others are closed */
    assert(tierfs_channel_receive(pair[1], &packet, 0) == 1);
    close(packet.descriptor);
    assert(next_descriptor() == next);
    send_raw(pair[0], &good, sizeof good, descriptors, 16); /* more than there is room for */
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO && packet.descriptor == -1);
    assert(next_descriptor() == next);
    bad.version++;
    send_raw(pair[0], &bad, sizeof bad, descriptors, 1);
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO && packet.descriptor == -1);
    assert(next_descriptor() == next);
    for (int i = 0; i < 16; i++)
        close(descriptors[i]);
    close(pair[0]);
    close(pair[1]);
}

static void test_strange_packets(void)
{
    static char large[TIERFS_CHANNEL_MAX_BYTES + 100];
    struct tierfs_channel_header header = {.version = TIERFS_CHANNEL_VERSION, .kind = 1, .body_bytes = 4};
    int pair[2];

    make_pair(pair);
    send_raw(pair[0], &header, sizeof header, NULL, 0); /* the body is missing */
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO);
    send_raw(pair[0], &header, 5, NULL, 0);
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO);
    header.body_bytes = UINT32_MAX;
    send_raw(pair[0], &header, sizeof header, NULL, 0);
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO);
    memcpy(large, &header, sizeof header);
    send_raw(pair[0], large, sizeof large, NULL, 0); /* longer than any */
    assert(tierfs_channel_receive(pair[1], &packet, 0) == -EPROTO);
    close(pair[0]);
    close(pair[1]);
}

int main(void)
{
    test_round_trip();
    test_full();
    test_the_end_with_something_unread();
    test_descriptors();
    test_strange_packets();
    return 0;
}
