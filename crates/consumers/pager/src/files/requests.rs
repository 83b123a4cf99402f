//! Does what the kernel's requests want.
//!
//! Each can be done twice: a successor is sent what was done and not answered.

use crate::core::Core;
use crate::fault::examine;
use crate::files::contents::{Found, MAX_PAGES, key_of};
use crate::files::fetch::{Away, Came, Fetcher};
use crate::files::table::{MAX_NAME, Owner};
use crate::shared::Shared;
use crate::state::tables::Key;
use hecaton_fuse::wire::{
    Answer, Attributes, IN_HEADER_BYTES, MAJOR, MIN_MINOR, ROOT, Reply, Request, WRITE_DATA_AT,
    init, init_answer, opcode, open, open_answer, set,
};
use hecaton_memory::PAGE_SIZE;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest read or write: the kernel cuts longer ones.
pub(super) const MAX_IO_BYTES: usize = 256 << 10;
/// The longest message, and as long a read that begins within a page.
pub(super) const BUFFER_BYTES: usize = WRITE_DATA_AT + MAX_IO_BYTES + PAGE_SIZE;

/// Bytes that the kernel reads ahead of a fault, at most.
const READ_AHEAD_BYTES: u32 = 64 << 10;
/// Requests that nobody waits for, at a time.
const BACKGROUND: u16 = 64;
/// How long the kernel may believe what it was told of a file: nobody else changes it.
const VALID_S: u64 = 3600;

/// Files whose names begin so are made anew each time, and have no name afterwards.
const NAMELESS: [&[u8]; 2] = [b"memfd:", b"shared:"];
/// The keeper's names for files that the kernel has numbers of.
const NUMBERED: u8 = b'#';

/// How long a read waits for room in local memory. Room comes by eviction, which needs no reads; if
/// nothing can be evicted, the limit is exceeded.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);

/// In the flags of a write: from the page cache.
const WRITE_CACHE: u32 = 1;

/// fallocate(2).
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// `statfs` says that so many files may be made: by that libhecaton.so knows this file system.
pub(crate) use hecaton_uffd::files::STATFS_MARK;

/// A request cannot be answered.
pub(super) enum Stop {
    Error(Errno),
    /// Not without waiting.
    Wait,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Error(errno)
    }
}

type Outcome = Result<Reply, Stop>;

/// Answers requests; with a way to donors, also those that must wait.
pub(super) struct Clerk {
    pub(super) shared: Arc<Shared>,
    pub(super) fetcher: Option<Fetcher>,
}

impl Clerk {
    /// Does what the request at the start of `buffer`, of `len` bytes, wants. The answer's bytes are
    /// put in its place.
    pub(super) fn answer(&mut self, request: &Request, buffer: &mut [u8], len: usize) -> Outcome {
        match request.opcode {
            opcode::READ => self.read(request, buffer),
            opcode::WRITE => self.write(request, buffer, len),
            opcode::SETATTR => self.set_attributes(request, buffer),
            opcode::FALLOCATE => self.allocate(request),
            opcode::INIT => init_reply(request, buffer),
            opcode::GETATTR => {
                Ok(attributes(&self.shared.lock(), request.node)?.answer(VALID_S).put_in(buffer))
            }
            opcode::LOOKUP => self.look_up(request, name(buffer, len, 0)?, buffer),
            opcode::CREATE => self.create(request, name(buffer, len, 16)?, buffer),
            opcode::UNLINK => self.unlink(request, &name(buffer, len, 0)?),
            opcode::OPEN => self.open(request, buffer),
            opcode::RELEASE => {
                let mut guard = self.shared.lock();
                let core = &mut *guard;
                if let Some(file) = core.files.table.close(&core.state, request.u64_at(0)) {
                    core.remove_file(file);
                }
                Ok(Reply::Bytes(0))
            }
            opcode::STATFS => {
                let sizes = Answer::<80>::new().u64(MAX_PAGES).u64(MAX_PAGES).u64(MAX_PAGES);
                let marked = sizes.u64(STATFS_MARK).u64(0).u32(4096).u32(MAX_NAME as u32);
                Ok(marked.u32(4096).put_in(buffer))
            }
            opcode::FSYNC | opcode::DESTROY => Ok(Reply::Bytes(0)),
            opcode::INTERRUPT | opcode::FORGET | opcode::BATCH_FORGET => Ok(Reply::Nothing),
            _ => Err(Errno::NOSYS.into()),
        }
    }

    fn look_up(&self, request: &Request, name: Vec<u8>, buffer: &mut [u8]) -> Outcome {
        let core = self.shared.lock();
        let file = match name.split_first() {
            _ if request.node != ROOT => None,
            Some((&NUMBERED, digits)) => {
                let number = std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok());
                number.and_then(|number| core.files.table.with_node(number))
            }
            _ => core.files.table.named(&name),
        };
        let node = core.files.table.node(file.ok_or(Errno::NOENT)?);
        Ok(attributes(&core, node)?.entry(VALID_S).put_in(buffer))
    }

    fn create(&self, request: &Request, name: Vec<u8>, buffer: &mut [u8]) -> Outcome {
        let (flags, mode) = (request.u32_at(0), request.u32_at(4));
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        let before = || request.was_sent_before().then_some(request.number());
        let again = before().and_then(|number| core.files.table.opened_by(&core.state, number));
        let is_nameless = NAMELESS.iter().any(|prefix| name.starts_with(prefix));
        let there = core.files.table.named(&name);
        let (file, handle) = match (again, there) {
            (Some(made), _) => made,
            (None, Some(_)) if flags & libc::O_EXCL as u32 != 0 => return Err(Errno::EXIST.into()),
            (None, Some(file)) => {
                let handle = core.files.table.open(&core.state, file, request.number());
                (file, handle.ok_or(Errno::NFILE)?)
            }
            (None, None) => {
                let owner = Owner { mode, user: request.user, group: request.group };
                let kept = (!is_nameless).then_some(&name[..]);
                let made = core.files.table.create(&core.state, kept, owner, request.number());
                let made = made.ok_or(Errno::NOSPC)?;
                core.files.table.set_modified(&core.state, made.0, now_s());
                made
            }
        };
        let entry = attributes(core, core.files.table.node(file))?.entry(VALID_S);
        let opened = open_answer(handle, open::KEEP_CACHE | open::NO_FLUSH);
        Ok(Answer::<144>::new().then(&entry).then(&opened).put_in(buffer))
    }

    fn unlink(&self, request: &Request, name: &[u8]) -> Outcome {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        match core.files.table.unlink(&core.state, name) {
            Ok(Some(file)) => core.remove_file(file),
            Ok(None) => {}
            Err(()) if request.was_sent_before() => {}
            Err(()) => return Err(Errno::NOENT.into()),
        }
        Ok(Reply::Bytes(0))
    }

    fn open(&self, request: &Request, buffer: &mut [u8]) -> Outcome {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
        let number = request.number();
        let again = request
            .was_sent_before()
            .then(|| core.files.table.opened_by(&core.state, number).map(|(_, handle)| handle));
        let handle = again.flatten().or_else(|| core.files.table.open(&core.state, file, number));
        let flags = open::KEEP_CACHE | open::NO_FLUSH;
        Ok(open_answer(handle.ok_or(Errno::NFILE)?, flags).put_in(buffer))
    }

    fn read(&mut self, request: &Request, buffer: &mut [u8]) -> Outcome {
        let (offset, bytes) = (request.u64_at(8), request.u32_at(16) as usize);
        let page = PAGE_SIZE as u64;
        let first = offset / page;
        let began = Instant::now();
        let mut avoid = Vec::new();
        loop {
            let mut core = self.shared.lock();
            let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
            let left = core.files.table.size(&core.state, file).saturating_sub(offset);
            let bytes = bytes.min(MAX_IO_BYTES).min(usize::try_from(left).unwrap_or(usize::MAX));
            let skipped = (offset % page) as usize;
            let pages = (skipped + bytes).div_ceil(PAGE_SIZE);
            if core.room() < pages as u64 && began.elapsed() < PATIENCE {
                drop(core);
                self.wait()?;
                continue;
            }
            let mut away = Vec::new();
            for (i, to) in buffer.chunks_exact_mut(PAGE_SIZE).take(pages).enumerate() {
                let found = core.find_of_file(key_of(file, first + i as u64));
                if let Found::Away { page, record } = found {
                    away.push((i, Away { page, record }));
                }
                copy(&core, found, to);
            }
            if !away.is_empty() {
                drop(core);
                let Some(came) = self.fetch(&away, &mut avoid, buffer)? else { continue };
                core = self.shared.lock();
                // Written, or cut, meanwhile?
                let is_as_before = away.iter().all(|&(i, Away { page, record })| {
                    let found = core.find_of_file(key_of(file, first + i as u64));
                    found == Found::Away { page, record }
                });
                if core.files.table.with_node(request.node) != Some(file) || !is_as_before {
                    continue;
                }
                core.stats.pages_in += came as u64;
            }
            let is_counted = !core.tables.are_full();
            for i in (0..pages as u64).filter(|_| is_counted) {
                core.cached(key_of(file, first + i));
            }
            core.note_peaks();
            if core.wants_eviction() {
                self.shared.evict.notify_one();
            }
            drop(core);
            buffer.copy_within(skipped..skipped + bytes, 0);
            return Ok(Reply::Bytes(bytes));
        }
    }

    /// Puts what donors have in its places in `buffer`; says how many pages came. `None` if one came
    /// wrong: its giver is to be avoided.
    fn fetch(
        &mut self,
        away: &[(usize, Away)],
        avoid: &mut Vec<hecaton_space::group::DonorIndex>,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, Stop> {
        let fetcher = self.fetcher.as_mut().ok_or(Stop::Wait)?;
        let pages: Vec<Away> = away.iter().map(|&(_, away)| away).collect();
        let mut data = vec![0; pages.len() * PAGE_SIZE];
        let came = match fetcher.fetch(&pages, avoid, &mut data) {
            Ok(came) => came,
            Err(error) => {
                let mut core = self.shared.lock();
                let is_wanted =
                    |away: &Away| core.pages.record(&core.state, away.page) == away.record;
                // Freed meanwhile, it may be lost: its segment was given back.
                if pages.iter().all(is_wanted) {
                    core.fail(error.to_string());
                    return Err(Errno::IO.into());
                }
                return Ok(None);
            }
        };
        let mut wrong = None;
        for ((&(i, away), came), data) in away.iter().zip(&came).zip(data.chunks(PAGE_SIZE)) {
            match *came {
                Came::Sound => buffer[i * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(data),
                Came::Wrong(giver) => {
                    let mut core = self.shared.lock();
                    if core.pages.record(&core.state, away.page) != away.record {
                        return Ok(None);
                    }
                    core.stats.checksum_errors += 1;
                    if avoid.len() + 1 >= fetcher.chances() {
                        core.fail(format!("a page came back wrong, {} times", avoid.len() + 1));
                        return Err(Errno::IO.into());
                    }
                    drop(core);
                    fetcher.suspect(away.page);
                    wrong = Some(giver);
                }
            }
        }
        avoid.extend(wrong);
        Ok(wrong.is_none().then_some(away.len()))
    }

    fn write(&mut self, request: &Request, buffer: &mut [u8], len: usize) -> Outcome {
        let (offset, bytes) = (request.u64_at(8), request.u32_at(16) as usize);
        let end = offset.checked_add(bytes as u64).ok_or(Errno::FBIG)?;
        let data = buffer.get(WRITE_DATA_AT..len).unwrap_or_default();
        let data = data.get(..bytes).ok_or(Errno::INVAL)?.to_vec();
        check_length(end)?;
        let is_cached = request.u32_at(20) & WRITE_CACHE != 0;
        let done = self.overwrite(request.node, offset, Source::Bytes(&data));
        if let (true, Err(Stop::Error(errno))) = (is_cached, &done) {
            // The kernel forgets what it could not write, and programs would read what was before.
            let reason = format!("what programs wrote to shared memory cannot be kept: {errno}");
            self.shared.lock().fail(reason);
        }
        done?;
        let mut core = self.shared.lock();
        let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
        let pages = offset / PAGE_SIZE as u64..end.div_ceil(PAGE_SIZE as u64);
        for key in pages.map(|page| key_of(file, page)) {
            // What is written from the page cache while it is dropped goes on being dropped.
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

    /// Gives a part of a file other contents.
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

    /// Changes a page of which a part stays as it is.
    fn overwrite_part(
        &mut self,
        node: u64,
        number: u64,
        skipped: usize,
        part: usize,
        change: impl Fn(&mut [u8]),
    ) -> Result<(), Stop> {
        let mut bytes = [0u8; PAGE_SIZE];
        let mut avoid = Vec::new();
        loop {
            let mut core = self.shared.lock();
            let file = core.files.table.with_node(node).ok_or(Errno::NOENT)?;
            let key = key_of(file, number);
            let found = core.find_of_file(key);
            copy(&core, found, &mut bytes);
            drop(core);
            if let Found::Away { page, record } = found {
                let away = [(0, Away { page, record })];
                if self.fetch(&away, &mut avoid, &mut bytes)?.is_none() {
                    continue;
                }
            }
            change(&mut bytes[skipped..skipped + part]);
            if self.put(node, number, &bytes, Some(found))? {
                return Ok(());
            }
        }
    }

    /// Puts a page into staging. False if it is not as it was `found`, which is none of a page that
    /// is written as a whole.
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
                return Err(Errno::IO.into());
            }
            if core.write_file(key, bytes, &content, found.is_none()) {
                return Ok(true);
            }
            drop(core);
            self.wait()?;
        }
    }

    /// Waits for the evictor, who makes room.
    fn wait(&self) -> Result<(), Stop> {
        if self.fetcher.is_none() {
            return Err(Stop::Wait);
        }
        self.shared.evict.notify_one();
        std::thread::sleep(PAUSE);
        Ok(())
    }

    fn set_attributes(&mut self, request: &Request, buffer: &mut [u8]) -> Outcome {
        let wanted = request.u32_at(0);
        if wanted & set::SIZE != 0 {
            self.resize(request.node, request.u64_at(16))?;
        }
        let core = self.shared.lock();
        let file = core.files.table.with_node(request.node).ok_or(Errno::PERM)?;
        let mut owner = core.files.table.owner(&core.state, file);
        if wanted & set::MODE != 0 {
            owner.mode = request.u32_at(68);
        }
        if wanted & set::UID != 0 {
            owner.user = request.u32_at(76);
        }
        if wanted & set::GID != 0 {
            owner.group = request.u32_at(80);
        }
        core.files.table.set_owner(&core.state, file, owner);
        if wanted & set::MTIME_NOW != 0 {
            core.files.table.set_modified(&core.state, file, now_s());
        } else if wanted & set::MTIME != 0 {
            core.files.table.set_modified(&core.state, file, request.u64_at(40));
        }
        Ok(attributes(&core, request.node)?.answer(VALID_S).put_in(buffer))
    }

    fn resize(&mut self, node: u64, bytes: u64) -> Result<(), Stop> {
        check_length(bytes)?;
        let page = PAGE_SIZE as u64;
        let core = self.shared.lock();
        let file = core.files.table.with_node(node).ok_or(Errno::PERM)?;
        let before = core.files.table.size(&core.state, file);
        drop(core);
        if bytes < before && !bytes.is_multiple_of(page) {
            // Zeros are found there when the file is made longer again.
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

    fn allocate(&mut self, request: &Request) -> Outcome {
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

/// What a part of a file is to hold.
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

/// Copies what is on this host. What is at donors stays as it is in `to`.
fn copy(core: &Core, found: Found, to: &mut [u8]) {
    match found {
        Found::Zeros => to.fill(0),
        // SAFETY: a slot that a record names holds that page's 4096 bytes, and the lock is held.
        Found::Staged(slot) => unsafe {
            to.as_mut_ptr().copy_from_nonoverlapping(core.state.slot(slot), PAGE_SIZE);
        },
        Found::Away { .. } => {}
    }
}

fn attributes(core: &Core, node: u64) -> Result<Attributes, Errno> {
    if node == ROOT {
        let (mode, modified_s) = (libc::S_IFDIR | 0o777, 0);
        let (size_bytes, data_bytes, links) = (0, 0, 2);
        let (user, group) = (0, 0);
        return Ok(Attributes {
            node,
            links,
            size_bytes,
            data_bytes,
            modified_s,
            mode,
            user,
            group,
        });
    }
    let table = &core.files.table;
    let file = table.with_node(node).ok_or(Errno::NOENT)?;
    let Owner { mode, user, group } = table.owner(&core.state, file);
    let size_bytes = table.size(&core.state, file);
    Ok(Attributes {
        node,
        links: table.links(file),
        size_bytes,
        data_bytes: size_bytes.next_multiple_of(PAGE_SIZE as u64),
        modified_s: table.modified(&core.state, file),
        mode: libc::S_IFREG | mode & 0o7777,
        user,
        group,
    })
}

/// The name at `at` of a request's arguments.
fn name(buffer: &[u8], len: usize, at: usize) -> Result<Vec<u8>, Errno> {
    let bytes = buffer.get(IN_HEADER_BYTES + at..len).ok_or(Errno::INVAL)?;
    let end = bytes.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
    if end > MAX_NAME { Err(Errno::NAMETOOLONG) } else { Ok(bytes[..end].to_vec()) }
}

fn init_reply(request: &Request, buffer: &mut [u8]) -> Outcome {
    let (major, minor) = (request.u32_at(0), request.u32_at(4));
    if major != MAJOR || minor < MIN_MINOR {
        return Err(Errno::PROTO.into());
    }
    let flags = request.u32_at(12) & (init::ASYNC_READ | init::BIG_WRITES | init::MAX_PAGES);
    let ahead = request.u32_at(8).min(READ_AHEAD_BYTES);
    Ok(init_answer(ahead, flags, 0, BACKGROUND, MAX_IO_BYTES as u32).put_in(buffer))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
