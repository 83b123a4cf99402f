//! Holds the files of a pager, under its lock, and the descriptors that they are served by.

use crate::files::keeper::messages::Order;
use crate::files::table::Table;
use crate::process::guard;
use crate::state::State;
use hecaton_memory::PageSum;
use rustix::net::{SendFlags, send};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

/// The files of a pager, guarded by its lock.
pub(crate) struct Files {
    pub(crate) table: Table,
    /// Staged pages that the evictor has not queued for donors yet: space page, sum, slot.
    pub(crate) to_write: Vec<(u64, PageSum, u32)>,
    /// Pages that the keeper was ordered to evict and has not reported yet.
    pub(crate) leaving: u64,
    /// Pages that the kernel has kept since it dropped one.
    pub(crate) kept: u64,
    /// Requests that wait for room in local memory.
    pub(crate) waiting: u32,
    /// `None` while no keeper runs.
    pub(crate) keeper: Option<KeeperLine>,
    /// Descriptors that the node holds; `None` until files are served.
    pub(crate) mount: Option<HeldMount>,
}

impl Files {
    /// Loads the files of the predecessor; none from a new state file.
    pub(crate) fn load(state: &State) -> Files {
        let table = Table::load(state);
        Files {
            table,
            to_write: Vec::new(),
            leaving: 0,
            kept: 0,
            waiting: 0,
            keeper: None,
            mount: None,
        }
    }
}

pub(crate) struct KeeperLine(pub(crate) Arc<OwnedFd>);

impl KeeperLine {
    /// Returns false if the connection's buffer is full, or the keeper has ended.
    pub(super) fn send(&self, order: &Order) -> bool {
        KeeperLine::send_on(&self.0, order)
    }

    pub(super) fn send_on(line: &OwnedFd, order: &Order) -> bool {
        send(line, &order.to_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
    }

    /// Orders the keeper to end after its earlier orders.
    pub(super) fn end(&self) {
        self.send(&Order::End);
    }
}

/// Descriptors of the mount that is served. The node holds copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldMount {
    /// `/dev/fuse`: the kernel's requests are read here.
    pub(crate) device: RawFd,
    /// Root of the mount: files are opened here.
    pub(crate) directory: RawFd,
    /// The connection to the keeper, and the keeper's process ID.
    pub(crate) keeper: Option<(RawFd, u32)>,
}

impl HeldMount {
    /// All descriptors, each with its label at the node.
    pub(crate) fn labelled(&self) -> Vec<(String, RawFd)> {
        let keeper = self.keeper.map(|(fd, pid)| (guard::keeper_label(pid), fd));
        [(guard::FILES_DEVICE, self.device), (guard::FILES_DIRECTORY, self.directory)]
            .into_iter()
            .map(|(label, fd)| (label.to_owned(), fd))
            .chain(keeper)
            .collect()
    }
}
