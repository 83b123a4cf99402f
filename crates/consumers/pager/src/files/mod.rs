//! Shared memory of programs: anonymous shared mappings, memory files (`memfd_create`), and POSIX
//! shared memory (`shm_open`).
//!
//! Several processes map such memory, and some use it by `read` and `write` as well. A userfaultfd
//! sees neither the others' mappings nor those calls. So the memory is made a file of a file system
//! that the pager serves (FUSE): the kernel keeps the pages that are in use in its page cache, with
//! one copy for all who map them. It asks the pager for those that are missing, and tells it what
//! was written. The pager has the kernel drop pages to keep to the local limit. Pages that the
//! kernel has pinned stay.
//!
//! The mount has no place in any directory. Programs get open files of it from the keeper, which is
//! a process of its own: who opens a file, or has pages dropped, waits for the pager, and a pager
//! that waited for itself could not be ended. When a pager is killed, mount, keeper and programs
//! stay, and the kernel sends its successor what was not answered (Linux 6.9).
//!
//! | module | does |
//! |---|---|
//! | [`table`] | knows which files there are, and who has them open |
//! | [`contents`] | knows where each page of them is |
//! | [`desk`] | reads the kernel's requests and answers what can be answered at once |
//! | [`requests`] | does what a request wants |
//! | [`backroom`] | answers what must wait: for donors, for room |
//! | [`fetch`] | fetches pages from donors, and waits for them |
//! | [`drops`] | has the kernel drop pages |
//! | [`service`] | starts all of it when a program first asks for shared memory |
//! | [`keeper`] | opens files for programs, and drops pages: another process |
//! | [`mount`] | makes the mount |

mod backroom;
pub(crate) mod contents;
mod desk;
pub(crate) mod drops;
mod fetch;
pub(crate) mod keeper;
mod mount;
mod requests;
pub(crate) mod service;
pub(crate) mod table;

use crate::state::State;
use hecaton_memory::PageSum;
use table::Table;

/// The files of a pager, under its lock.
pub(crate) struct Files {
    pub(crate) table: Table,
    /// Staged pages that the evictor has not heard of: space page, sum, slot.
    pub(crate) to_write: Vec<(u64, PageSum, u32)>,
    /// Pages in the page cache that the keeper was told to have dropped.
    pub(crate) leaving: u64,
    /// The way to the keeper, once there is one.
    pub(crate) keeper: Option<drops::KeeperLine>,
    /// What the node holds, once files are served.
    pub(crate) mount: Option<service::HeldMount>,
}

impl Files {
    /// What a predecessor left; nothing in a new state.
    pub(crate) fn load(state: &State) -> Files {
        let table = Table::load(state);
        Files { table, to_write: Vec::new(), leaving: 0, keeper: None, mount: None }
    }
}
