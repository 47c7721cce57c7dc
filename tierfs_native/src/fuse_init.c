#define _GNU_SOURCE
#include "fuse_init.h"

#include "log.h"

#include <stdint.h>
#include <sys/socket.h>

/*
 * Reads of the page cache are background requests for the kernel, which sends 12 at a time if it is not told
 * otherwise: as many that wait for the store would keep all others from being sent, those of local files too.
 */
#define BACKGROUND_REQUESTS 1024u

/* One packet is one message, and it has to fit into the buffer of the socket. */
static void cap_messages(int socket, struct fuse_init_out *granted)
{
    int buffer = 0;
    socklen_t size = sizeof buffer;
    const uint32_t page = 4096;

    if (getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer, &size) < 0 || buffer <= 0)
        return;
    uint32_t pages = (uint32_t)buffer / page;
    pages = pages > 3 ? pages - 2 : 1; /* headers, and what the kernel counts besides the bytes */
    if (granted->max_write > pages * page)
        granted->max_write = pages * page;
    if ((granted->flags & FUSE_MAX_PAGES) != 0 && granted->max_pages > pages)
        granted->max_pages = (uint16_t)pages;
}

/* The kernel's own calculation (fs/fuse/dev_uring.c): a payload holds the largest request and the largest answer. */
static size_t payload_of(const struct fuse_init_out *granted)
{
    size_t pages =
        (granted->flags & FUSE_MAX_PAGES) != 0 && granted->max_pages != 0 ? granted->max_pages : 32;
    size_t bytes = granted->max_write > pages * 4096 ? granted->max_write : pages * 4096;

    return bytes > FUSE_MIN_READ_BUFFER ? bytes : FUSE_MIN_READ_BUFFER;
}

void tierfs_init_amend(const struct tierfs_init_terms *terms, const struct fuse_init_in *asked,
                       struct fuse_out_header *header, size_t bytes)
{
    struct fuse_init_out *granted = (void *)(header + 1);
    uint64_t offered = asked->flags;
    uint64_t added = 0;

    if (header->error != 0 || bytes < sizeof *header + sizeof *granted)
        return;
    if ((asked->flags & FUSE_INIT_EXT) != 0)
        offered |= (uint64_t)asked->flags2 << 32;
    added = offered & (FUSE_PARALLEL_DIROPS | FUSE_DO_READDIRPLUS | FUSE_INIT_EXT);
    /*
     * With the first version, which pyfuse3 asks for, the kernel asks for security.capability before every write;
     * with the second one once, until it gets attributes.
     */
    added |= offered & FUSE_HANDLE_KILLPRIV_V2;
    if (terms->lists_plainly)
        added |= offered & FUSE_READDIRPLUS_AUTO;
    if ((offered & FUSE_PASSTHROUGH) != 0) {
        added |= FUSE_PASSTHROUGH;
        granted->max_stack_depth = 1;
    }
    cap_messages(terms->socket, granted);
    if (terms->prepare_ring != NULL &&
        terms->prepare_ring(terms->context, (offered & FUSE_OVER_IO_URING) != 0, payload_of(granted)))
        added |= FUSE_OVER_IO_URING;
    granted->max_background = BACKGROUND_REQUESTS;
    granted->congestion_threshold = BACKGROUND_REQUESTS / 4 * 3;
    if (terms->truncates_apart)
        granted->flags &= ~(uint32_t)FUSE_ATOMIC_O_TRUNC;
    granted->flags |= (uint32_t)(added & UINT32_MAX);
    granted->flags2 |= (uint32_t)(added >> 32);
    tierfs_info("the kernel is answered  minor=%u max_write=%u max_pages=%u passthrough=%d", granted->minor,
                granted->max_write, granted->max_pages, (offered & FUSE_PASSTHROUGH) != 0);
}
