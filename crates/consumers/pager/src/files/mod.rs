//! Serves the shared memory of programs as files of a FUSE file system.
//!
//! A second pager of the consumer serves anonymous shared mappings, memory files (`memfd_create`)
//! and POSIX shared memory (`shm_open`). A userfaultfd was rejected: it reports neither other
//! processes' mappings nor `read` and `write` calls.
//!
//! The kernel's page cache holds the local pages, once for all processes that map them. The kernel
//! requests missing pages by FUSE_READ, and writes dirty pages back by FUSE_WRITE. To keep to the
//! local limit, the pager has pages evicted from the page cache, unless they are pinned.
//!
//! The mount has no place in any directory. The keeper opens files for programs and evicts pages.
//! Both wait for the pager, and a process that waits for its own file system cannot be
//! killed. So the keeper is a process of its own. If the pager is killed, mount, keeper and
//! programs stay, and the kernel resends the unanswered requests to the successor (Linux 6.9).
//!
//! | module | does |
//! |---|---|
//! | [`held`] | holds it all, under the pager's lock |
//! | [`table`] | lists the files and their open handles |
//! | [`contents`] | tracks where each page of a file is |
//! | [`dispatcher`] | reads requests, and answers those that need not wait |
//! | [`requests`] | executes requests |
//! | [`workers`] | answers requests that wait for donors, staging slots or local memory |
//! | [`fetch`] | fetches pages from donors |
//! | [`evict`] | evicts pages from the page cache, through the keeper |
//! | [`wish`] | has the node start a pager of shared memory |
//! | [`service`] | starts the threads and the keeper when a program first asks for shared memory |
//! | [`keeper`] | a process: opens files for programs, and evicts pages |
//! | [`mount`] | creates the mount |

pub(crate) mod contents;
mod dispatcher;
pub(crate) mod evict;
mod fetch;
pub(crate) mod held;
pub(crate) mod keeper;
mod mount;
mod requests;
pub(crate) mod service;
pub(crate) mod table;
pub(crate) mod wish;
mod workers;
