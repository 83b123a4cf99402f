//! Evicts pages of files from the page cache, through the keeper.
//!
//! The evictor chooses the pages by the eviction order. Each order to the keeper covers one run of
//! pages. They count as resident, and are busy, until the keeper reports their outcome. Pages that
//! the kernel has kept stay resident.

use crate::core::Core;
use crate::files::contents::{key_of, page_of};
use crate::files::keeper::{MESSAGE_BYTES, Order, Part, Report};
use crate::shared::Shared;
use crate::state::tables::Key;
use hecaton_memory::PAGE_SIZE;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::os::fd::OwnedFd;

/// With this many pages in flight to the keeper, no further orders are sent.
const MAX_LEAVING: u64 = 1024;

impl Core {
    /// Orders the keeper to invalidate these pages of files, which are sorted and busy. Pages for
    /// which no order can be sent stay. Returns whether any order was sent.
    pub(crate) fn drop_from_files(&mut self, keys: &[Key]) -> bool {
        let is_full = self.files.leaving >= MAX_LEAVING;
        let mut is_told = false;
        self.files.leaving += keys.len() as u64;
        for run in keys.chunk_by(|one, next| one.plus(1) == *next) {
            let (file, page) = page_of(run[0]).expect("they are pages of files");
            let order = Order::Drop(Part {
                node: self.files.table.node(file),
                offset: page * PAGE_SIZE as u64,
                bytes: (run.len() * PAGE_SIZE) as u64,
            });
            let line = self.files.keeper.as_ref().filter(|_| !is_full);
            if line.is_some_and(|line| line.send(&order)) {
                is_told = true;
            } else {
                run.iter().for_each(|&key| self.not_dropped(key));
            }
        }
        is_told
    }

    fn heard(&mut self, report: &Report) {
        let Part { node, offset, bytes } = report.part;
        let Some(file) = self.files.table.with_node(node) else { return };
        let page = PAGE_SIZE as u64;
        let keys = (offset / page..(offset + bytes) / page).map(|number| key_of(file, number));
        if report.is_kept {
            keys.for_each(|key| self.not_dropped(key));
            self.stats.evictions_refused += bytes / page;
            self.files.kept += bytes / page;
            return;
        }
        keys.for_each(|key| self.dropped(key));
        self.files.kept = 0;
        self.clock.advance(bytes / page);
        self.wake_waiting();
    }

    /// Keeps all pages that the keeper was ordered to invalidate: it has ended.
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

/// Handles the keeper's reports until the keeper has ended.
pub(super) fn listen(shared: &Shared, line: &OwnedFd) {
    let mut bytes = [0u8; MESSAGE_BYTES];
    loop {
        let read = match recv(line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => 0,
        };
        let mut core = shared.lock();
        match Report::parse(&bytes[..read]) {
            Some(report) => core.heard(&report),
            None => return core.lose_keeper(),
        }
        drop(core);
        shared.evict.notify_one();
    }
}
