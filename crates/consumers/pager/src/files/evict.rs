//! Evicts pages of files from the page cache, through the keeper.
//!
//! The eviction order chooses the pages. They count as resident, and are busy, until the keeper
//! reports their outcome. Pages that the kernel has kept stay resident.

use crate::core::Core;
use crate::files::contents::{key_of, page_of};
use crate::files::keeper::messages::{MAX_BYTES, Order, Report};
use crate::shared::Shared;
use crate::state::CHUNK_PAGES;
use crate::state::tables::ALL_PAGES;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::files::FileRun;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::os::fd::OwnedFd;

/// Most pages in flight to the keeper.
const MAX_LEAVING: u64 = 1024;

/// What became of a wish for room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The keeper was ordered to evict pages.
    Ordered,
    /// Reports, or a keeper, must come first.
    Waits,
    /// The kernel has kept every page since it dropped one.
    AllKept,
}

impl Core {
    /// Chooses at most `most` pages of files, and orders the keeper to evict them.
    pub(crate) fn evict_from_files(&mut self, most: usize) -> Progress {
        let most = most.min(MAX_LEAVING.saturating_sub(self.files.leaving) as usize);
        if most == 0 || self.files.keeper.is_none() {
            return Progress::Waits;
        }
        let keys = self.choose(most, |_, _| true);
        self.files.leaving += keys.len() as u64;
        let runs: Vec<FileRun> = keys
            .chunk_by(|one, next| one.plus(1) == *next)
            .map(|run| {
                let (file, page) = page_of(run[0]).expect("they are pages of files");
                let node = self.files.table.node(file);
                let (offset, bytes) = (page * PAGE_SIZE as u64, (run.len() * PAGE_SIZE) as u64);
                FileRun { node, offset, bytes }
            })
            .collect();
        let line = self.files.keeper.as_ref().filter(|_| !runs.is_empty());
        if !line.is_some_and(|line| line.send(&Order::Drop(runs))) {
            keys.into_iter().for_each(|key| self.kept(key));
            return Progress::Waits;
        }
        if self.files.kept >= self.resident { Progress::AllKept } else { Progress::Ordered }
    }

    fn heard(&mut self, report: &Report) {
        let FileRun { node, offset, bytes } = report.run;
        let Some(file) = self.files.table.with_node(node) else { return };
        let page = PAGE_SIZE as u64;
        let keys = (offset / page..(offset + bytes) / page).map(|number| key_of(file, number));
        if report.is_kept {
            keys.for_each(|key| self.kept(key));
            self.stats.evictions_refused += bytes / page;
            self.files.kept += bytes / page;
            return;
        }
        keys.for_each(|key| self.dropped(key));
        self.files.kept = 0;
        self.clock.advance(bytes / page);
        self.shrink_excess();
        self.wake_waiting();
    }

    /// Keeps all pages that the keeper was ordered to evict: it has ended.
    fn lose_keeper(&mut self) {
        self.files.keeper = None;
        let files: Vec<usize> = self.files.table.used().collect();
        for file in files {
            for first in self.tables.chunks_in(key_of(file, 0).space(), ALL_PAGES) {
                for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                    if self.get(key).is_busy() {
                        self.kept(key);
                    }
                }
            }
        }
    }
}

/// Handles the keeper's reports until the keeper has ended.
pub(super) fn listen(shared: &Shared, line: &OwnedFd) {
    let mut bytes = [0u8; MAX_BYTES];
    loop {
        let read = match recv(line, &mut bytes, RecvFlags::empty()) {
            Ok((read, _)) => read,
            Err(Errno::INTR) => continue,
            Err(_) => 0,
        };
        let mut core = shared.lock();
        match Report::parse_all(&bytes[..read]) {
            Some(reports) => reports.iter().for_each(|report| core.heard(report)),
            None => return core.lose_keeper(),
        }
        drop(core);
        shared.evict.notify_one();
    }
}
