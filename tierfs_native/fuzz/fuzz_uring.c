/*
 * The parts of a request as they come through io_uring, with any sizes in them: what is put together lies inside the
 * buffers, has the size that it says, and holds the bytes of its parts. And the list of CPUs, as text.
 *
 * An input: 4 bytes for the length, 4 for the size of the payload, one for the capacity, then the parts.
 */
#include "uring.h"
#include "uring_message.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define COPY_BYTES 512u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void put_together(const uint8_t *data, size_t size)
{
    struct fuse_uring_req_header header;
    struct fuse_in_header head;
    char *message = NULL;

    memset(&header, 0, sizeof header);
    memcpy(&head, data, sizeof head.len);
    memcpy(&header.ring_ent_in_out.payload_sz, data + 4, 4);
    const size_t capacity = (size_t)data[8] * 8;
    data += 9;
    size -= 9;
    if (head.len % 3 == 0) /* noise rarely says a size that can be */
        head.len = head.len % 2000;
    if (header.ring_ent_in_out.payload_sz % 3 == 0)
        header.ring_ent_in_out.payload_sz %= 2000;
    /* Allocations of their own: what is read or written beyond them is found. */
    char *room = malloc(TIERFS_URING_HEAD_BYTES + capacity);
    char *copy = malloc(COPY_BYTES);
    assert(room != NULL && copy != NULL);
    char *payload = room + TIERFS_URING_HEAD_BYTES;
    memset(room, 0, TIERFS_URING_HEAD_BYTES + capacity);
    head.opcode = FUSE_WRITE;
    memcpy(header.in_out, &head, sizeof head);
    memcpy(header.op_in, data, size < sizeof header.op_in ? size : sizeof header.op_in);
    memcpy(payload, data, size < capacity ? size : capacity);
    size_t bytes = tierfs_uring_message(&header, payload, capacity, copy, COPY_BYTES, &message);
    if (bytes != 0) {
        const size_t payload_bytes = header.ring_ent_in_out.payload_sz;
        assert(bytes == head.len && payload_bytes <= capacity && bytes >= sizeof head + payload_bytes);
        assert(bytes <= COPY_BYTES ? message == copy : message + bytes == payload + payload_bytes);
        assert(memcmp(message, header.in_out, sizeof head) == 0);
        assert(memcmp(message + sizeof head, header.op_in, bytes - sizeof head - payload_bytes) == 0);
        assert(memcmp(message + bytes - payload_bytes, payload, payload_bytes) == 0);
    }
    free(room);
    free(copy);
}

static void count_cpus(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);

    assert(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    unsigned count = tierfs_uring_count_cpus(text);
    assert(count <= UINT16_MAX);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    count_cpus(data, size);
    if (size >= 9)
        put_together(data, size);
    return 0;
}
