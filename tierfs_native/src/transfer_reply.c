#include "transfer_reply.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

struct text {
    const char *start;
    size_t bytes;
};

/* What the headers have said; each at most once. */
struct said {
    struct text etag;
    uint64_t length;
    bool has_length, has_etag, has_range;
    bool keeps_open;
};

static bool is_word(struct text text, const char *word)
{
    return text.bytes == strlen(word) && strncasecmp(text.start, word, text.bytes) == 0;
}

static struct text trimmed(struct text text)
{
    while (text.bytes > 0 && (*text.start == ' ' || *text.start == '\t')) {
        text.start++;
        text.bytes--;
    }
    while (text.bytes > 0 && (text.start[text.bytes - 1] == ' ' || text.start[text.bytes - 1] == '\t'))
        text.bytes--;
    return text;
}

/* Takes digits from the start of the text; false if there are none, or too many. */
static bool take_number(struct text *text, uint64_t *number)
{
    size_t digits = 0;

    *number = 0;
    while (digits < text->bytes && text->start[digits] >= '0' && text->start[digits] <= '9' && digits < 19) {
        *number = *number * 10 + (uint64_t)(text->start[digits] - '0');
        digits++;
    }
    text->start += digits;
    text->bytes -= digits;
    return digits > 0 && digits < 19;
}

static bool take_character(struct text *text, char character)
{
    if (text->bytes == 0 || *text->start != character)
        return false;
    text->start++;
    text->bytes--;
    return true;
}

/* "bytes FIRST-LAST/SIZE", with * for a size that is not told. */
static bool is_wanted_range(struct text text, const struct tierfs_reply_wanted *wanted)
{
    const uint64_t end = wanted->offset + wanted->length;
    uint64_t first, last, size;

    if (text.bytes < 6 || strncasecmp(text.start, "bytes ", 6) != 0)
        return false;
    text.start += 6;
    text.bytes -= 6;
    if (!take_number(&text, &first) || !take_character(&text, '-') || !take_number(&text, &last) ||
        !take_character(&text, '/') || first != wanted->offset || last + 1 != end)
        return false;
    if (take_character(&text, '*'))
        return text.bytes == 0;
    return take_number(&text, &size) && text.bytes == 0 && size >= end;
}

static struct text without_quotes(struct text etag)
{
    if (etag.bytes >= 2 && etag.start[0] == 'W' && etag.start[1] == '/') {
        etag.start += 2;
        etag.bytes -= 2;
    }
    if (etag.bytes >= 2 && etag.start[0] == '"' && etag.start[etag.bytes - 1] == '"') {
        etag.start++;
        etag.bytes -= 2;
    }
    return etag;
}

static bool note_header(struct text name, struct text value, const struct tierfs_reply_wanted *wanted,
                        struct said *said)
{
    if (is_word(name, "content-length")) {
        bool again = said->has_length;
        said->has_length = take_number(&value, &said->length) && value.bytes == 0;
        return said->has_length && !again;
    }
    if (is_word(name, "etag")) {
        bool again = said->has_etag;
        said->has_etag = true;
        said->etag = without_quotes(value);
        return !again;
    }
    if (is_word(name, "content-range")) {
        bool again = said->has_range;
        said->has_range = is_wanted_range(value, wanted);
        return said->has_range && !again;
    }
    if (is_word(name, "connection"))
        said->keeps_open = said->keeps_open && is_word(value, "keep-alive");
    return !is_word(name, "transfer-encoding") && !is_word(name, "content-encoding");
}

/* The first line without its end: "HTTP/1.1 206 Partial Content". */
static bool is_success(struct text line)
{
    return line.bytes >= 12 && memcmp(line.start, "HTTP/1.1 20", 11) == 0 &&
           (line.start[11] == '0' || line.start[11] == '6') && (line.bytes == 12 || line.start[12] == ' ');
}

/* Takes a line and its end (CR LF) from the text; false: there is no whole one. */
static bool take_line(struct text *text, struct text *line)
{
    const char *end = memchr(text->start, '\n', text->bytes);

    if (end == NULL)
        return false;
    line->start = text->start;
    line->bytes = (size_t)(end - text->start);
    text->start = end + 1;
    text->bytes -= line->bytes + 1;
    if (line->bytes > 0 && line->start[line->bytes - 1] == '\r')
        line->bytes--;
    return true;
}

/* All headers, up to the empty line, which is taken too. 1: they are as wanted, 0: more has to come, -EPROTO. */
static int take_headers(struct text *rest, const struct tierfs_reply_wanted *wanted, struct said *said)
{
    struct text line;

    while (take_line(rest, &line)) {
        const char *colon;

        if (line.bytes == 0)
            return 1;
        colon = memchr(line.start, ':', line.bytes);
        if (colon == NULL || colon == line.start)
            return -EPROTO;
        const struct text name = {line.start, (size_t)(colon - line.start)};
        const struct text value = {colon + 1, line.bytes - name.bytes - 1};
        if (!note_header(name, trimmed(value), wanted, said))
            return -EPROTO;
    }
    return 0;
}

long tierfs_reply_check(const char *data, size_t bytes, const struct tierfs_reply_wanted *wanted,
                        bool *keeps_open)
{
    struct text rest = {data, bytes < TIERFS_REPLY_HEAD_BYTES ? bytes : TIERFS_REPLY_HEAD_BYTES};
    const long more = bytes < TIERFS_REPLY_HEAD_BYTES ? 0 : -EPROTO;
    struct said said = {.keeps_open = true};
    struct text line;

    if (!take_line(&rest, &line))
        return more;
    if (!is_success(line))
        return -EPROTO;
    int result = take_headers(&rest, wanted, &said);
    if (result <= 0)
        return result < 0 ? result : more;
    /* Without Content-Range the body is the whole object, whatever the status. */
    if (!said.has_length || said.length != wanted->length || (!said.has_range && wanted->offset != 0))
        return -EPROTO;
    if (!said.has_etag || said.etag.bytes != wanted->etag_bytes ||
        memcmp(said.etag.start, wanted->etag, wanted->etag_bytes) != 0)
        return -EPROTO;
    *keeps_open = said.keeps_open;
    return (long)(rest.start - data);
}
