#define _GNU_SOURCE
#include "channel.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

int tierfs_channel_send(int socket, uint16_t kind, uint64_t value, const void *body, size_t body_bytes,
                        int flags)
{
    struct tierfs_channel_header header = {
        .version = TIERFS_CHANNEL_VERSION, .kind = kind, .body_bytes = (uint32_t)body_bytes, .value = value};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, body_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = body_bytes != 0 ? 2 : 1};

    if (body_bytes > TIERFS_CHANNEL_MAX_BYTES)
        return -EMSGSIZE;
    for (;;) {
        if (sendmsg(socket, &message, MSG_NOSIGNAL | flags) >= 0)
            return 0;
        if (errno != EINTR)
            return -errno;
    }
}

/* The first descriptor that came along; any other is closed. */
static int take_descriptor(struct msghdr *message)
{
    int taken = -1;

    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control != NULL;
         control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(control) + i * sizeof(int), sizeof descriptor);
            if (taken < 0)
                taken = descriptor;
            else
                close(descriptor);
        }
    }
    return taken;
}

int tierfs_channel_receive(int socket, struct tierfs_packet *packet, int flags)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec parts[2] = {{&packet->header, sizeof packet->header}, {packet->body, sizeof packet->body}};
    struct msghdr message = {.msg_iov = parts,
                             .msg_iovlen = 2,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    ssize_t received;

    packet->descriptor = -1;
    do
        received = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    while (received < 0 && errno == EINTR);
    if (received < 0)
        return errno == ECONNRESET ? 0 : -errno;
    packet->descriptor = take_descriptor(&message);
    if (received == 0)
        return 0;
    if ((size_t)received < sizeof packet->header || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
        packet->header.version != TIERFS_CHANNEL_VERSION ||
        packet->header.body_bytes != (size_t)received - sizeof packet->header) {
        if (packet->descriptor >= 0)
            close(packet->descriptor);
        packet->descriptor = -1;
        return -EPROTO;
    }
    return 1;
}
