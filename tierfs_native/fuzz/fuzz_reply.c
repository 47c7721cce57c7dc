/* The head of a reply, as it comes: all at once, and with its end cut off anywhere. */
#include "transfer_reply.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char start[] = "HTTP/1.1 206 Partial Content\r\nETag: \"abc\"\r\n";
    const struct tierfs_reply_wanted wanted = {
        .offset = size % 3 * 4096, .length = 4096, .etag = "abc", .etag_bytes = 3};
    const size_t before = size % 2 == 0 ? sizeof start - 1 : 0;
    /* Exactly as large as it says: a byte too far is seen. */
    char *head = malloc(before + size + 1);
    bool keeps_open = false;

    assert(head != NULL);
    memcpy(head, start, before);
    if (size > 0)
        memcpy(head + before, data, size);
    const long whole = tierfs_reply_check(head, before + size, &wanted, &keeps_open);
    assert(whole == -EPROTO || (whole >= 0 && (size_t)whole <= before + size));
    for (size_t bytes = 0; bytes < before + size && size < 512; bytes++) {
        char *part = malloc(bytes + (bytes == 0));
        assert(part != NULL);
        memcpy(part, head, bytes);
        const long found = tierfs_reply_check(part, bytes, &wanted, &keeps_open);
        /* More bytes change a verdict only from "more" to another. */
        assert(found == 0 || found == whole || (found == -EPROTO && whole == -EPROTO));
        free(part);
    }
    free(head);
    return 0;
}
