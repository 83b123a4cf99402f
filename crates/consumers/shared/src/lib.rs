//! Shared memory of a consumer's programs: files of a file system whose disk is a volume.
//!
//! Several processes map shared memory, and some also `read` and `write` it. A userfaultfd reports
//! neither other processes' mappings nor those calls. So `libhecaton.so` replaces shared memory by
//! files of an ext4 file system on a volume of the pool. The kernel's page cache holds the local
//! pages, once for all who use them, fetches missing ones, and writes dirty ones back. Like each
//! page cache it keeps pages that are pinned or being written.
//!
//! The *keeper*, a process for each consumer that has shared memory, opens these files for programs
//! and keeps the page cache within a limit. It waits for the volume; a process that waits for a
//! disk cannot be killed, so neither pager nor node does this. The keeper has no state but the
//! [`record`]: if it is killed, the pager starts another.
//!
//! | module | does |
//! |---|---|
//! | [`keeper`] | runs the process |
//! | [`line`] | carries the messages between pager and keeper |
//! | [`serve`], [`open`] | answer programs that want files |
//! | [`record`] | lists the files, by handles that keep no file alive |
//! | [`evict`] | drops pages from the page cache |
//! | [`clock`] | decides which pages are next |
//! | [`cache`] | asks the kernel about the page cache |
//! | [`throttle`] | limits dirty pages of the file system |

pub mod cache;
pub mod clock;
mod evict;
pub mod keeper;
pub mod line;
mod open;
pub mod record;
mod serve;
mod throttle;
