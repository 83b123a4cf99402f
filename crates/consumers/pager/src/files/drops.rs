//! Has the kernel drop pages of files from its page cache, by way of the keeper.
//!
//! The evictor chooses them with all other pages, by the one eviction order. The keeper says of
//! each run when it has been dropped; meanwhile the pages count as resident.

use crate::core::Core;
use crate::files::contents::{key_of, page_of};
use crate::files::keeper::Order;
use crate::shared::Shared;
use crate::state::tables::Key;
use hecaton_memory::PAGE_SIZE;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Pages that are leaving when no further ones are told of.
const MAX_LEAVING: u64 = 1024;

/// A connection to the keeper.
pub(crate) struct KeeperLine(pub(crate) Arc<OwnedFd>);

impl KeeperLine {
    /// False if the keeper has more to do than it can take, or has ended.
    fn send(&self, order: &Order) -> bool {
        send(&*self.0, &order.to_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
    }

    /// The keeper ends once it has done what it was told.
    pub(crate) fn end(&self) {
        self.send(&Order::End);
    }
}

impl Core {
    /// Tells the keeper to have these pages of files dropped, which are in order, and busy. Those
    /// of which it cannot be told stay. Says whether it was told of any.
    pub(crate) fn drop_from_files(&mut self, keys: &[Key]) -> bool {
        let is_too_many = self.files.leaving >= MAX_LEAVING;
        let mut is_told = false;
        self.files.leaving += keys.len() as u64;
        for run in keys.chunk_by(|one, next| one.plus(1) == *next) {
            let (file, page) = page_of(run[0]).expect("they are pages of files");
            let order = Order::Drop {
                node: self.files.table.node(file),
                offset: page * PAGE_SIZE as u64,
                bytes: (run.len() * PAGE_SIZE) as u64,
            };
            let line = self.files.keeper.as_ref().filter(|_| !is_too_many);
            if line.is_some_and(|line| line.send(&order)) {
                is_told = true;
            } else {
                run.iter().for_each(|&key| self.not_dropped(key));
            }
        }
        is_told
    }

    fn heard(&mut self, order: &Order) {
        let Order::Drop { node, offset, bytes } = *order else { return };
        let Some(file) = self.files.table.with_node(node) else { return };
        let page = PAGE_SIZE as u64;
        for number in offset / page..(offset + bytes) / page {
            self.dropped(key_of(file, number));
        }
        self.clock.advance(bytes / page);
        self.wake_waiting();
    }

    /// Nobody has pages dropped any more, until there is another keeper.
    fn lose_keeper(&mut self) {
        self.files.keeper = None;
        let files: Vec<usize> = self.files.table.used().collect();
        for file in files {
            let space = key_of(file, 0).space();
            for first in self.tables.chunks_in(space, crate::state::tables::ALL_PAGES) {
                for key in (0..crate::state::CHUNK_PAGES).map(|i| first.plus(i)) {
                    self.not_dropped(key);
                }
            }
        }
    }
}

/// Takes in what the keeper has done, until it has ended.
pub(super) fn listen(shared: &Shared, line: &OwnedFd) {
    let mut bytes = [0u8; Order::BYTES];
    loop {
        let read = match recv(line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => 0,
        };
        let mut core = shared.lock();
        match Order::parse(&bytes[..read]) {
            Some(order) => core.heard(&order),
            None => return core.lose_keeper(),
        }
        drop(core);
        shared.evict.notify_one();
    }
}
