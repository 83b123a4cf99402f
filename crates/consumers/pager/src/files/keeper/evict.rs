//! Evicts pages from the page cache, unless somebody uses them.
//!
//! 1. The programs' pager has the pages dropped from the page tables of all programs.
//! 2. The kernel writes dirty pages back, and the pager of shared memory stores them.
//! 3. The kernel is advised to drop the pages. It keeps those that are dirty again, mapped, or
//!    pinned (a device or a system call reads or writes them): nothing that is written meanwhile is
//!    lost.
//!
//! `FUSE_NOTIFY_INVAL_INODE` would do all of it, but it drops pinned pages too: what a direct read
//! into them brings afterwards is lost.

use super::messages::Report;
use super::names::Mount;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::files::{FileRun, Unmap};
use rustix::fs::{Advice, AtFlags, StatxFlags, fadvise, statx};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
    sockopt,
};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Time for the programs' pager to have pages unmapped. It may be stopped, or about to be replaced.
const UNMAP_PATIENCE: Duration = Duration::from_millis(100);

/// The libc crate does not have the number yet. It is the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

pub(super) struct Evictor {
    mount: Arc<Mount>,
    /// Major and minor number of the mount's device.
    device: [u32; 2],
    /// The socket of the programs' pager.
    programs: PathBuf,
}

impl Evictor {
    pub(super) fn new(mount: Arc<Mount>, programs: PathBuf) -> io::Result<Evictor> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let known = statx(&mount.directory, "", flags, StatxFlags::TYPE)?;
        let device = [known.stx_dev_major, known.stx_dev_minor];
        lift_dirty_limit(device);
        Ok(Evictor { mount, device, programs })
    }

    /// Evicts what can be evicted of these runs.
    pub(super) fn evict(&self, runs: &[FileRun]) -> Vec<Report> {
        let mut files: HashMap<u64, Option<OwnedFd>> = HashMap::new();
        for run in runs {
            // An error: the file was removed.
            files.entry(run.node).or_insert_with(|| self.mount.open_node(run.node).ok());
        }
        if let Err(error) = self.unmap(runs) {
            tracing::debug!(%error, "pages may stay mapped: no answer from the programs' pager");
        }
        let of_files = || runs.iter().filter_map(|run| Some((run, files[&run.node].as_ref()?)));
        for wait in [0, libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER] {
            // All are started before the first is waited for.
            of_files().for_each(|(run, file)| write_back(file, run, wait));
        }
        for (run, file) in of_files() {
            let bytes = std::num::NonZeroU64::new(run.bytes);
            // An error leaves the pages where they are.
            let _ = fadvise(file, run.offset, bytes, Advice::DontNeed);
        }
        let mut reports = Vec::with_capacity(runs.len());
        for run in runs {
            match &files[&run.node] {
                Some(file) => look(file, run, &mut reports),
                None => reports.push(Report { run: *run, is_kept: false }),
            }
        }
        reports
    }

    /// Has the pages dropped from page tables. An error: perhaps not all are.
    fn unmap(&self, runs: &[FileRun]) -> io::Result<()> {
        let pager = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        for way in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
            sockopt::set_socket_timeout(&pager, way, Some(UNMAP_PATIENCE))?;
        }
        connect(&pager, &SocketAddrUnix::new(&self.programs)?)?;
        send(&pager, Unmap::new(self.device, runs).as_bytes(), SendFlags::NOSIGNAL)?;
        // The pager closes the connection when it is done.
        recv(&pager, &mut [0u8; 1], RecvFlags::empty())?;
        Ok(())
    }
}

/// Lifts the kernel's limit on dirty pages of FUSE file systems, which slows writers down. The
/// pager limits them too, since it limits all cached pages of the mount.
fn lift_dirty_limit([major, minor]: [u32; 2]) {
    let place = format!("/sys/class/bdi/{major}:{minor}");
    for (name, value) in [("strict_limit", "0"), ("max_ratio", "100")] {
        if let Err(error) = std::fs::write(format!("{place}/{name}"), value) {
            tracing::debug!(%error, name, "cannot lift the dirty-page limit; writes may be slow");
        }
    }
}

/// Has the kernel write dirty pages back. `wait`: further flags of sync_file_range(2).
fn write_back(file: &OwnedFd, run: &FileRun, wait: u32) {
    // SAFETY: numbers only.
    let _ = unsafe {
        let (at, len) = (run.offset as i64, run.bytes as i64);
        libc::sync_file_range(file.as_raw_fd(), at, len, libc::SYNC_FILE_RANGE_WRITE | wait)
    };
}

/// Reports what the kernel has kept of a run: the whole in one report if it kept nothing, or else
/// page by page, neighbours of one outcome together.
fn look(file: &OwnedFd, run: &FileRun, reports: &mut Vec<Report>) {
    if cached_pages(file, run.offset, run.bytes) == 0 {
        return reports.push(Report { run: *run, is_kept: false });
    }
    let first = reports.len();
    let page = PAGE_SIZE as u64;
    for offset in (run.offset..run.offset + run.bytes).step_by(PAGE_SIZE) {
        let is_kept = cached_pages(file, offset, page) > 0;
        match reports[first..].last_mut() {
            Some(last) if last.is_kept == is_kept => last.run.bytes += page,
            _ => reports.push(Report { run: FileRun { offset, bytes: page, ..*run }, is_kept }),
        }
    }
}

/// Pages of the range that are in the page cache (`cachestat`, Linux 6.5). 0 on an error.
fn cached_pages(file: &OwnedFd, offset: u64, bytes: u64) -> u64 {
    let range = [offset, bytes];
    // Cached, dirty, in write-back, evicted, recently evicted.
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two words of `range`, and writes five of `counts`.
    let done = unsafe {
        let (range, counts) = (range.as_ptr(), counts.as_mut_ptr());
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range, counts, 0)
    };
    if done == 0 { counts[0] } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_the_kernel_keeps_are_reported_as_runs() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE_SIZE], 0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE_SIZE], 3 * 4096).unwrap();
        let file = OwnedFd::from(file);
        let run = FileRun { node: 7, offset: 0, bytes: 4 * 4096 };
        if cached_pages(&file, 0, run.bytes) == 0 {
            println!("skipped: pages_that_the_kernel_keeps_are_reported_as_runs: no cachestat");
            return;
        }
        let mut reports = vec![Report { run, is_kept: true }];
        look(&file, &run, &mut reports);
        let runs: Vec<_> = reports[1..]
            .iter()
            .map(|report| (report.run.offset / 4096, report.run.bytes / 4096, report.is_kept))
            .collect();
        assert_eq!(runs, [(0, 1, true), (1, 2, false), (3, 1, true)]);
    }
}
