/* One line per event on standard error, in the form of the engine's log, which is the same file. */
#pragma once

#define tierfs_info(...) tierfs_log("info", __VA_ARGS__)
#define tierfs_warning(...) tierfs_log("warning", __VA_ARGS__)
#define tierfs_error(...) tierfs_log("error", __VA_ARGS__)

__attribute__((format(printf, 2, 3))) void tierfs_log(const char *level, const char *format, ...);
