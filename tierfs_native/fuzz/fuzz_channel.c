/*
 * What the front reads from the engine's channel: packets of arbitrary bytes, with and without descriptors.
 *
 * An input: packets of one byte for the descriptors that come along, two for the size, then the bytes.
 */
#include "channel.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS_MAX 6

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int next_descriptor(void)
{
    int descriptor = dup(STDERR_FILENO);

    assert(descriptor >= 0);
    close(descriptor);
    return descriptor;
}

static void send_packet(int socket, const uint8_t *data, size_t bytes, size_t descriptors)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)(uintptr_t)data, bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    if (descriptors != 0) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
        struct cmsghdr *first = CMSG_FIRSTHDR(&message);
        first->cmsg_level = SOL_SOCKET;
        first->cmsg_type = SCM_RIGHTS;
        first->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
        for (size_t i = 0; i < descriptors; i++) {
            const int descriptor = STDERR_FILENO;
            memcpy(CMSG_DATA(first) + i * sizeof(int), &descriptor, sizeof descriptor);
        }
    }
    assert(sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tierfs_packet packet;
    int pair[2];
    int next;

    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    next = next_descriptor();
    while (size >= 3) {
        uint16_t bytes;
        const size_t descriptors = data[0] % (DESCRIPTORS_MAX + 1);

        memcpy(&bytes, data + 1, sizeof bytes);
        data += 3;
        size -= 3;
        if (bytes == 0 || bytes > size)
            bytes = (uint16_t)size;
        if (bytes == 0)
            break;
        send_packet(pair[0], data, bytes, descriptors);
        data += bytes;
        size -= bytes;
        int result = tierfs_channel_receive(pair[1], &packet, MSG_DONTWAIT);
        assert(result == 1 || result == -EPROTO);
        if (result == 1) {
            assert(packet.header.version == TIERFS_CHANNEL_VERSION);
            assert(packet.header.body_bytes == bytes - sizeof packet.header);
            assert(memcmp(packet.body, data - bytes + sizeof packet.header, packet.header.body_bytes) == 0);
            assert((packet.descriptor >= 0) == (descriptors != 0));
            if (packet.descriptor >= 0)
                close(packet.descriptor);
        } else {
            assert(packet.descriptor == -1);
        }
        assert(next_descriptor() == next);
    }
    close(pair[0]);
    assert(tierfs_channel_receive(pair[1], &packet, 0) == 0);
    close(pair[1]);
    return 0;
}
