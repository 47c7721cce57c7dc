/* How many queues there are, and how many entries each has. See uring.h. */
#define _GNU_SOURCE
#include "uring_state.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

unsigned tierfs_uring_depth(unsigned queues, size_t payload_bytes)
{
    uint64_t depth;

    if (queues == 0 || payload_bytes == 0)
        return 0;
    depth = TIERFS_URING_MEMORY_BYTES / queues / (payload_bytes + TIERFS_URING_PAGE_BYTES);
    return depth > TIERFS_URING_MAX_DEPTH ? TIERFS_URING_MAX_DEPTH : (unsigned)depth;
}

unsigned tierfs_uring_count_cpus(const char *possible)
{
    unsigned long count = 0;

    for (;;) {
        char *end;
        unsigned long first = strtoul(possible, &end, 10);
        unsigned long last = first;
        if (end == possible || first > UINT16_MAX)
            return 0;
        if (*end == '-') {
            possible = end + 1;
            last = strtoul(possible, &end, 10);
            if (end == possible || last < first || last > UINT16_MAX)
                return 0;
        }
        count += last - first + 1;
        if (*end == '\0' || *end == '\n')
            return count <= UINT16_MAX ? (unsigned)count : 0;
        if (*end != ',')
            return 0;
        possible = end + 1;
    }
}

unsigned tierfs_uring_possible_cpus(void)
{
    char text[1024];
    int descriptor = open("/sys/devices/system/cpu/possible", O_RDONLY | O_CLOEXEC);
    ssize_t bytes = descriptor >= 0 ? read(descriptor, text, sizeof text - 1) : -1;

    if (descriptor >= 0)
        close(descriptor);
    if (bytes <= 0)
        return 0;
    text[bytes] = '\0';
    return tierfs_uring_count_cpus(text);
}
