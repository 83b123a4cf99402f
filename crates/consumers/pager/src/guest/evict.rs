//! Takes pages of guest RAM away: protect, copy, punch, settle, with no help from the hypervisor.
//!
//! Steps 2 and 3 of an eviction (see [`crate::evict`]) for pages that are in a memory file. The
//! pages are write-protected: from then on whoever writes (a vCPU, a device's thread, KVM on behalf
//! of either, the kernel's own copy to the guest) waits, because faults on busy pages do. Readers
//! go on. The pages are read from the file into staging, and then punched out of it, which takes
//! them from every mapping at once; from then on readers wait too. So no write can come between the
//! copy and the end of the page.
//!
//! Two kinds of access bypass the protection, and the kernel reports neither:
//!
//! - A device writes to a page that was pinned before (VFIO, a disk read with O_DIRECT in flight).
//! - Another process maps the file and accesses it (vhost-user).
//!
//! `hecaton vm` refuses machines that are set up so.

use super::FilePlace;
use super::memory_file::MemoryFile;
use crate::evict::Evictor;
use crate::evict::take::{Victim, runs_of};
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::Uffd;
use std::ops::Range;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages of a batch that lie one behind the other in one file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct FileRun {
    file: MemoryFile,
    offset: u64,
    /// The victims' places in the group.
    items: Vec<usize>,
}

impl FileRun {
    fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + self.items.len() as u64 * PAGE
    }
}

fn file_runs(places: &[Option<FilePlace>], chosen: impl Fn(usize) -> bool) -> Vec<FileRun> {
    let mut runs: Vec<FileRun> = Vec::new();
    for (item, place) in places.iter().enumerate() {
        let Some(FilePlace { file, offset }) = place.filter(|_| chosen(item)) else { continue };
        match runs.last_mut() {
            Some(run) if run.file == file && run.bytes().end == offset => run.items.push(item),
            _ => runs.push(FileRun { file, offset, items: vec![item] }),
        }
    }
    runs
}

impl Evictor {
    /// `first` is the group's first place in the batch; `places` are the pages' in their files.
    pub(crate) fn take_from_files(
        &mut self,
        first: usize,
        group: &mut [Victim],
        uffd: Uffd,
        places: &[Option<FilePlace>],
    ) {
        for run in runs_of(group, |_| true) {
            // The mappings are changing (EAGAIN) or gone (ENOENT). The pages stay for this time.
            if uffd.protect(run.start, run.len).is_err() {
                let addresses = run.start..run.start + run.len;
                self.skip(group, |victim| addresses.contains(&victim.key.address()));
            }
        }
        for run in file_runs(places, |item| group[item].slot.is_some()) {
            self.read_run(first, group, &run);
        }
        for run in file_runs(places, |item| group[item].is_droppable()) {
            match run.file.punch(run.bytes()) {
                Ok(true) => run.items.iter().for_each(|&item| group[item].taken = true),
                Ok(false) => {
                    // The guest may have read zeros already.
                    let why = "the kernel keeps pages of guest RAM that were punched out: they are \
                               parts of huge pages";
                    self.shared.lock().fail(why.into());
                }
                Err(error) => tracing::warn!(%error, "guest RAM cannot be punched"),
            }
        }
        // Dirty pages that stay are written to as before; clean ones stay protected.
        for run in runs_of(group, |victim| !victim.taken && !victim.clean) {
            let _ = uffd.unprotect(run.start, run.len);
        }
    }

    fn read_run(&mut self, first: usize, group: &mut [Victim], run: &FileRun) {
        let core = self.shared.lock();
        let slot = |item: usize| group[item].slot.expect("the run was chosen by it");
        let to: Vec<libc::iovec> = run
            .items
            .iter()
            .map(|&item| libc::iovec {
                iov_base: core.state.slot(slot(item)).cast(),
                iov_len: PAGE_SIZE,
            })
            .collect();
        drop(core);
        // SAFETY: the slots were taken for this batch, so nobody else touches them.
        if !unsafe { run.file.read(run.offset, &to) } {
            return;
        }
        let core = self.shared.lock();
        for &item in &run.items {
            core.state.batch.copied(first + item, slot(item));
        }
        drop(core);
        run.items.iter().for_each(|&item| group[item].copied = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_file_or_the_choice_does() {
        let place = |fd, page: u64| Some(FilePlace { file: MemoryFile(fd), offset: page * PAGE });
        let places =
            [place(3, 0), place(3, 1), place(3, 2), None, place(3, 3), place(4, 4), place(4, 6)];
        let runs = file_runs(&places, |item| item != 1);
        let short: Vec<_> =
            runs.iter().map(|run| (run.file.0, run.offset / PAGE, run.items.clone())).collect();
        assert_eq!(short, [(3, 0, vec![0]), (3, 2, vec![2, 4]), (4, 4, vec![5]), (4, 6, vec![6])]);
        assert_eq!(runs[1].bytes(), 2 * PAGE..4 * PAGE);
        assert!(file_runs(&places, |_| false).is_empty());
    }
}
