//! Writes files: replaces contents, cuts files, and punches holes.

use super::read::copy;
use super::{Handler, Outcome, Stop, now_s};
use crate::fault::examine;
use crate::files::contents::{Found, MAX_PAGES, key_of};
use crate::files::fetch::Away;
use crate::state::tables::Key;
use hecaton_fuse::wire::{Answer, Reply, Request, WRITE_DATA_AT};
use hecaton_memory::PAGE_SIZE;
use rustix::io::Errno;

/// In the flags of a write: the kernel writes a dirty page of its page cache back.
const WRITE_CACHE: u32 = 1;

/// Modes of fallocate(2).
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// Whether this write is of dirty pages of the page cache, and not of a program.
pub(in crate::files) fn is_write_back(request: &Request) -> bool {
    request.u32_at(20) & WRITE_CACHE != 0
}

impl Handler {
    pub(super) fn write(&mut self, request: &Request, buffer: &mut [u8], len: usize) -> Outcome {
        let (offset, bytes) = (request.u64_at(8), request.u32_at(16) as usize);
        let end = offset.checked_add(bytes as u64).ok_or(Errno::FBIG)?;
        let data = buffer.get(WRITE_DATA_AT..len).unwrap_or_default();
        let data = data.get(..bytes).ok_or(Errno::INVAL)?.to_vec();
        check_length(end)?;
        let is_cached = is_write_back(request);
        let done = self.overwrite(request.node, offset, Source::Bytes(&data));
        if let (true, Err(Stop::Error(errno))) = (is_cached, &done) {
            let reason = format!("cannot store what programs wrote to shared memory: {errno}");
            self.shared.lock().fail(reason);
            return Err(Stop::Lost);
        }
        done?;
        let mut core = self.shared.lock();
        let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
        let pages = offset / PAGE_SIZE as u64..end.div_ceil(PAGE_SIZE as u64);
        for key in pages.map(|page| key_of(file, page)) {
            // The write-back of a page that is being evicted does not bring the page back.
            if !(is_cached && core.get(key).is_busy()) {
                core.cached(key);
            }
        }
        if !is_cached {
            let size = core.files.table.size(&core.state, file).max(end);
            core.files.table.set_size(&core.state, file, size);
            core.files.table.set_modified(&core.state, file, now_s());
        }
        core.note_peaks();
        drop(core);
        self.shared.evict.notify_one();
        Ok(Answer::<8>::new().u32(bytes as u32).put_in(buffer))
    }

    /// Replaces a part of a file.
    fn overwrite(&mut self, node: u64, offset: u64, source: Source<'_>) -> Result<(), Stop> {
        let page = PAGE_SIZE as u64;
        let end = offset + source.len();
        let mut at = offset;
        while at < end {
            let (number, skipped) = (at / page, (at % page) as usize);
            let part = (PAGE_SIZE - skipped).min((end - at) as usize);
            if part == PAGE_SIZE
                && let Source::Bytes(bytes) = source
            {
                let bytes = &bytes[(at - offset) as usize..][..PAGE_SIZE];
                self.put(node, number, bytes, None)?;
            } else {
                self.overwrite_part(node, number, skipped, part, |to| match source {
                    Source::Bytes(bytes) => {
                        to.copy_from_slice(&bytes[(at - offset) as usize..][..part]);
                    }
                    Source::Zeros(_) => to.fill(0),
                })?;
            }
            at += part as u64;
        }
        Ok(())
    }

    /// Replaces a part of a page.
    fn overwrite_part(
        &mut self,
        node: u64,
        number: u64,
        skipped: usize,
        part: usize,
        change: impl Fn(&mut [u8]),
    ) -> Result<(), Stop> {
        let mut bytes = [0u8; PAGE_SIZE];
        loop {
            let mut core = self.shared.lock();
            let file = core.files.table.with_node(node).ok_or(Errno::NOENT)?;
            let key = key_of(file, number);
            let found = core.find_of_file(key);
            copy(&core, found, &mut bytes);
            drop(core);
            if let Found::Away { page, record } = found {
                let away = [(0, Away { page, record })];
                if self.fetch(&away, &mut bytes)?.is_none() {
                    continue;
                }
            }
            change(&mut bytes[skipped..skipped + part]);
            if self.put(node, number, &bytes, Some(found))? {
                return Ok(());
            }
        }
    }

    /// Stages a page. Returns false if its contents have moved since they were `found`. `found` is
    /// `None` if the request writes the whole page.
    fn put(
        &mut self,
        node: u64,
        number: u64,
        bytes: &[u8],
        found: Option<Found>,
    ) -> Result<bool, Stop> {
        let content = examine(bytes);
        loop {
            let mut core = self.shared.lock();
            let file = core.files.table.with_node(node).ok_or(Errno::NOENT)?;
            let key: Key = key_of(file, number);
            if found.is_some_and(|found| core.find_of_file(key) != found) {
                return Ok(false);
            }
            if core.tables.are_full() {
                return Err(Errno::NOSPC.into());
            }
            if core.failed.is_some() {
                return Err(Stop::Lost);
            }
            if core.write_file(key, bytes, &content, found.is_none()) {
                return Ok(true);
            }
            drop(core);
            self.wait()?;
        }
    }

    pub(super) fn resize(&mut self, node: u64, bytes: u64) -> Result<(), Stop> {
        check_length(bytes)?;
        let page = PAGE_SIZE as u64;
        let core = self.shared.lock();
        let file = core.files.table.with_node(node).ok_or(Errno::PERM)?;
        let before = core.files.table.size(&core.state, file);
        drop(core);
        if bytes < before && !bytes.is_multiple_of(page) {
            // If the file grows again, its old last page must end in zeros.
            let rest = bytes.next_multiple_of(page) - bytes;
            self.overwrite(node, bytes, Source::Zeros(rest))?;
        }
        let mut core = self.shared.lock();
        let file = core.files.table.with_node(node).ok_or(Errno::PERM)?;
        core.files.table.set_size(&core.state, file, bytes);
        core.files.table.set_modified(&core.state, file, now_s());
        core.cut_file(file, bytes.div_ceil(page)..MAX_PAGES);
        Ok(())
    }

    pub(super) fn allocate(&mut self, request: &Request) -> Outcome {
        let (offset, bytes, mode) = (request.u64_at(8), request.u64_at(16), request.u32_at(24));
        let end = offset.checked_add(bytes).ok_or(Errno::FBIG)?;
        check_length(end)?;
        let page = PAGE_SIZE as u64;
        match mode & !KEEP_SIZE {
            0 => {}
            PUNCH_HOLE | ZERO_RANGE => {
                let whole = offset.div_ceil(page)..(end / page).max(offset.div_ceil(page));
                let head = offset..end.min(whole.start * page);
                let tail = (whole.end * page).clamp(head.end, end)..end;
                for part in [head, tail] {
                    self.overwrite(request.node, part.start, Source::Zeros(part.end - part.start))?;
                }
                let mut core = self.shared.lock();
                let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
                core.cut_file(file, whole);
            }
            _ => return Err(Errno::OPNOTSUPP.into()),
        }
        let core = self.shared.lock();
        let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
        if mode & (KEEP_SIZE | PUNCH_HOLE) == 0 {
            let size = core.files.table.size(&core.state, file).max(end);
            core.files.table.set_size(&core.state, file, size);
        }
        Ok(Reply::Bytes(0))
    }
}

/// New contents of a part of a file.
#[derive(Clone, Copy)]
enum Source<'a> {
    Bytes(&'a [u8]),
    Zeros(u64),
}

impl Source<'_> {
    fn len(&self) -> u64 {
        match self {
            Source::Bytes(bytes) => bytes.len() as u64,
            Source::Zeros(bytes) => *bytes,
        }
    }
}

fn check_length(bytes: u64) -> Result<(), Errno> {
    if bytes > MAX_PAGES * PAGE_SIZE as u64 { Err(Errno::FBIG) } else { Ok(()) }
}
