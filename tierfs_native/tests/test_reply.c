/* Heads of replies: which are taken, and which are left to somebody who understands more. */
#include "transfer_reply.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

static bool keeps_open;

static long check_range(const char *head, uint64_t offset, uint64_t length)
{
    const struct tierfs_reply_wanted wanted = {
        .offset = offset, .length = length, .etag = "0a1b", .etag_bytes = 4};

    return tierfs_reply_check(head, strlen(head), &wanted, &keeps_open);
}

static long check(const char *head)
{
    return check_range(head, 100, 50);
}

#define OK "HTTP/1.1 206 Partial Content\r\n"
#define RANGE "Content-Range: bytes 100-149/1000\r\n"
#define LENGTH "Content-Length: 50\r\n"
#define ETAG "ETag: \"0a1b\"\r\n"
#define END "\r\n"

static void test_taken(void)
{
    const char *plain = OK RANGE LENGTH ETAG END;

    assert(check(plain) == (long)strlen(plain) && keeps_open);
    assert(check(OK RANGE LENGTH ETAG END "body") == (long)strlen(plain));
    assert(
        check(
            "HTTP/1.1 206\r\ncontent-range:\tbytes 100-149/* \r\nCONTENT-LENGTH:50\r\netag: W/\"0a1b\"\r\n" END) >
        0);
    assert(check(OK RANGE LENGTH ETAG "Connection: close\r\n" END) > 0 && !keeps_open);
    assert(check(OK RANGE LENGTH ETAG "Connection: Keep-Alive\r\n" END) > 0 && keeps_open);
    assert(check(OK RANGE LENGTH ETAG "Server: x: y\r\nX-Empty:\r\n" END) > 0);
    /* The whole object, which is what was asked for. */
    assert(check_range("HTTP/1.1 200 OK\r\n" LENGTH ETAG END, 0, 50) > 0);
    assert(check_range(OK "Content-Range: bytes 0-49/50\r\n" LENGTH ETAG END, 0, 50) > 0);
}

static void test_more(void)
{
    const char *whole = OK RANGE LENGTH ETAG END;
    const struct tierfs_reply_wanted wanted = {.offset = 100, .length = 50, .etag = "0a1b", .etag_bytes = 4};

    for (size_t bytes = 0; bytes < strlen(whole); bytes++)
        assert(tierfs_reply_check(whole, bytes, &wanted, &keeps_open) == 0);
}

static void test_refused(void)
{
    static const char *const heads[] = {
        "HTTP/1.0 206 OK\r\n" RANGE LENGTH ETAG END,
        "HTTP/1.1 404 Not Found\r\n" RANGE LENGTH ETAG END,
        "HTTP/1.1 204 No Content\r\n" RANGE LENGTH ETAG END,
        "HTTP/1.1 2060 OK\r\n" RANGE LENGTH ETAG END,
        "HTTP/1.1 200 OK\r\n" LENGTH ETAG END, /* the start of the object, and not the range */
        OK RANGE ETAG END,
        OK RANGE LENGTH END,
        OK RANGE LENGTH LENGTH ETAG END,
        OK RANGE RANGE LENGTH ETAG END,
        OK RANGE LENGTH ETAG ETAG END,
        OK RANGE "Content-Length: 49\r\n" ETAG END,
        OK RANGE "Content-Length: +50\r\n" ETAG END,
        OK RANGE "Content-Length: 50, 50\r\n" ETAG END,
        OK RANGE "Content-Length: 99999999999999999999\r\n" ETAG END,
        OK RANGE LENGTH "ETag: \"0a1c\"\r\n" END,
        OK RANGE LENGTH "ETag: \"0a1b2\"\r\n" END,
        OK RANGE LENGTH "ETag:\r\n" END,
        OK "Content-Range: bytes 101-150/1000\r\n" LENGTH ETAG END,
        OK "Content-Range: bytes 100-148/1000\r\n" LENGTH ETAG END,
        OK "Content-Range: bytes 100-149/149\r\n" LENGTH ETAG END,
        OK "Content-Range: bytes 100-149\r\n" LENGTH ETAG END,
        OK "Content-Range: items 100-149/1000\r\n" LENGTH ETAG END,
        OK RANGE LENGTH ETAG "Transfer-Encoding: chunked\r\n" END,
        OK RANGE LENGTH ETAG "Content-Encoding: gzip\r\n" END,
        OK RANGE LENGTH ETAG "no colon\r\n" END,
        OK RANGE LENGTH ETAG ": no name\r\n" END,
        "<html>\r\n" END,
    };

    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        assert(check(heads[i]) == -EPROTO);
}

static void test_a_head_without_end(void)
{
    static char head[TIERFS_REPLY_HEAD_BYTES + 1];

    memset(head, 'x', TIERFS_REPLY_HEAD_BYTES);
    memcpy(head, OK, strlen(OK));
    head[TIERFS_REPLY_HEAD_BYTES - 1] = '\0';
    assert(check(head) == 0);
    head[TIERFS_REPLY_HEAD_BYTES - 1] = 'x';
    assert(check(head) == -EPROTO);
}

int main(void)
{
    test_taken();
    test_more();
    test_refused();
    test_a_head_without_end();
    return 0;
}
