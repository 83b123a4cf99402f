//! Executes the kernel's requests.
//!
//! A request is idempotent: a successor gets it again if it was executed and not answered.

mod read;
pub(super) mod write;

use crate::core::Core;
use crate::files::contents::MAX_PAGES;
use crate::files::fetch::Fetcher;
use crate::files::table::{MAX_NAME, Owner};
use crate::shared::Shared;
use hecaton_fuse::wire::{
    Answer, Attributes, IN_HEADER_BYTES, MAJOR, MIN_MINOR, ROOT, Reply, Request, WRITE_DATA_AT,
    init, init_answer, opcode, open, open_answer, set,
};
use hecaton_memory::PAGE_SIZE;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest read or write: the kernel splits longer ones.
pub(super) const MAX_IO_BYTES: usize = 256 << 10;
/// Room for the longest message, and for the longest read that begins within a page.
pub(super) const BUFFER_BYTES: usize = WRITE_DATA_AT + MAX_IO_BYTES + PAGE_SIZE;

/// Most bytes that the kernel reads ahead.
const READ_AHEAD_BYTES: u32 = 64 << 10;
/// Requests in flight that no thread waits for. They are write-back only: without
/// [`init::ASYNC_READ`] a thread waits for each read, also for one that is ahead of need. Reads wait
/// for room, and must not be in the way of the write-back that makes room.
const BACKGROUND: u16 = 64;
/// How long the kernel may cache attributes, in seconds: they change by its requests only.
const VALID_S: u64 = 3600;

/// Prefixes of names that each create a new file, which has no name afterwards.
const NAMELESS: [&[u8]; 2] = [b"memfd:", b"shared:"];
/// First byte of the names by which the keeper opens a file by its inode number.
const NUMBERED: u8 = b'#';

/// `f_files` of `statfs`: libhecaton.so recognizes this file system by it.
pub(crate) use hecaton_uffd::files::STATFS_MARK;

/// Why a request was not executed.
pub(super) enum Stop {
    Error(Errno),
    /// The dispatcher must not wait: a worker executes the request.
    Wait,
    /// Contents are lost. The kernel gets no answer: it would take a page for clean whose
    /// write-back has failed, and later read its old contents.
    Lost,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Error(errno)
    }
}

pub(super) type Outcome = Result<Reply, Stop>;

/// Executes requests. Without a fetcher it stops at those that must wait.
pub(super) struct Handler {
    pub(super) shared: Arc<Shared>,
    pub(super) fetcher: Option<Fetcher>,
}

impl Handler {
    /// Executes a request. Its message is in the first `len` bytes of `buffer`, if it has a name or
    /// data. The answer replaces it.
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

/// The name that begins at byte `at` of a request's arguments.
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
    let flags = request.u32_at(12) & (init::BIG_WRITES | init::MAX_PAGES);
    let ahead = request.u32_at(8).min(READ_AHEAD_BYTES);
    Ok(init_answer(ahead, flags, 0, BACKGROUND, MAX_IO_BYTES as u32).put_in(buffer))
}

pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
