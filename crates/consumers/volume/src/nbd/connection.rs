//! Serves the requests of one client.
//!
//! Several threads serve a connection, and take turns at reading from it. The thread with the turn
//! starts each short read or write as it arrives ([`flow`](crate::volume::flow)). It asks donors
//! for all of them at once, and sends the client all finished answers with one call. Another
//! request may block, so its thread passes the turn on before it executes and answers it.
//!
//! The thread with the turn waits for the client and donors only, for both at once: requests in
//! flight lock pages that others may need. It leaves the turn during such requests only if another
//! thread takes it. It blocks on a client that takes no answers only after they are done. Over TLS
//! no request is executed with the turn.

use super::outbox::{Outbox, ReadHead, Reply};
use super::stream::{Input, Stream};
use super::wire::{
    Command, Malformed, Request, Session, allocation, chunk, errno, flag, only_chunk, simple_reply,
};
use crate::extents::Extent;
use crate::requests::spare::Spare;
use crate::volume::flow::{self, Begun, Ended, Flow, Unfinished, WAIT};
use crate::volume::{Contents, Volume};
use crate::{BlockError, nbd::wire::MAX_PAYLOAD};
use rustix::event::PollFlags;
use rustix::net::SendFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Scope;
use std::time::Duration;

/// Most requests of a client that are threads' own at a time.
const MAX_THREADS: usize = 16;

/// Bytes of data that a client's requests under way may have, together.
const MAX_BYTES: usize = MAX_PAYLOAD as usize;

/// Extents that one answer names at most; a client asks for the rest again.
const MAX_EXTENTS: usize = 4096;

/// A client that has chosen the volume.
pub(super) struct Connection {
    volume: Arc<Volume>,
    session: Session,
    stream: Stream,
    reading: Mutex<Reading>,
    /// Held while a reply is written.
    writing: Mutex<Outbox>,
    bytes: Budget,
    is_over: AtomicBool,
}

/// State that belongs to the thread with the turn.
struct Reading {
    input: Input,
    flow: Flow<Asked>,
    /// For threads of their own.
    todo: VecDeque<Todo>,
    /// Answers that are not written yet.
    replies: Vec<Reply>,
    /// Answers that the client had not taken when it was last tried.
    untaken: usize,
    spare: Spare,
    /// How many serve the connection.
    threads: usize,
    /// How many of them are doing what was asked.
    busy: usize,
}

/// A request, and how much of the budget it has.
#[derive(Clone, Copy)]
struct Asked {
    request: Request,
    held: usize,
}

/// Work that a thread does without the turn.
enum Todo {
    /// This, with the data of a write.
    Answer(Asked, Vec<u8>),
    /// Writes that were begun and have failed.
    Finish(Unfinished<Asked>),
}

/// Outcome of taking a request from the input.
enum Taken {
    Request,
    /// More has to come.
    Nothing,
    /// The client has said that it goes.
    End,
}

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Reading {
    /// Whether nothing is under way that others may wait for.
    fn is_idle(&self) -> bool {
        self.flow.is_idle() && self.replies.is_empty() && self.untaken == 0
    }

    fn has_room(&self) -> bool {
        self.flow.len() + self.replies.len() + self.untaken < flow::MAX_UNDER_WAY
    }

    /// Notes how a request ended that was under way.
    fn ended(&mut self, session: Session, ended: Ended<Asked>) {
        match ended {
            Ended::Read(Asked { request, held }, data, contents) => {
                self.replies.push(Reply::of_read(&request, session, contents, data, held));
            }
            Ended::Written(Asked { request, held }) => {
                self.replies.push(Reply::done(request.cookie, held));
            }
            Ended::Unread(asked) => {
                let buffer = self.spare.take(asked.held);
                self.todo.push_back(Todo::Answer(asked, buffer));
            }
            // First: it has pages that others may wait for.
            Ended::Unwritten(unfinished) => self.todo.push_front(Todo::Finish(unfinished)),
        }
    }
}

impl Connection {
    pub(super) fn new(volume: Arc<Volume>, session: Session, stream: Stream) -> Connection {
        let reading = Reading {
            input: Input::new(stream.clone()),
            flow: Flow::new(Arc::clone(&volume)),
            todo: VecDeque::new(),
            replies: Vec::new(),
            untaken: 0,
            spare: Spare::new(MAX_THREADS),
            threads: 1,
            busy: 0,
        };
        Connection {
            volume,
            session,
            stream,
            reading: Mutex::new(reading),
            writing: Mutex::default(),
            bytes: Budget::new(MAX_BYTES),
            is_over: AtomicBool::new(false),
        }
    }

    /// Serves until the client has gone, and all that it asked for is done.
    pub(super) fn serve(&self) {
        std::thread::scope(|scope| self.work(scope));
    }

    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut done = None;
        while let Some(todo) = self.next(scope, done) {
            done = Some(self.work_off(todo));
        }
    }

    /// Does what is a thread's own; gives back the buffer that it had.
    fn work_off(&self, todo: Todo) -> Vec<u8> {
        match todo {
            Todo::Answer(Asked { request, held }, mut buffer) => {
                if let Err(error) = self.answer(&request, &mut buffer) {
                    self.end(&error.into());
                }
                self.bytes.give_back(held);
                buffer
            }
            Todo::Finish(unfinished) => {
                for (Asked { request, held }, result) in unfinished.finish(&self.volume) {
                    let answered = match result {
                        Ok(()) => self.send(&[&simple_reply(request.cookie, 0)]),
                        Err(error) => self.refuse(&request, errno_of(&error), request.offset),
                    };
                    if let Err(error) = answered {
                        self.end(&error.into());
                    }
                    self.bytes.give_back(held);
                }
                Vec::new()
            }
        }
    }

    /// Takes the turn until this thread has work to do without it. `done`: the buffer of its last
    /// work.
    fn next<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        done: Option<Vec<u8>>,
    ) -> Option<Todo> {
        let mut reading = self.reading();
        if let Some(buffer) = done {
            reading.busy -= 1;
            reading.spare.keep(buffer);
        }
        let mut todo = loop {
            if let Some(todo) = reading.todo.pop_front() {
                break todo;
            }
            if self.is_over.load(Acquire) {
                self.settle(&mut reading);
                match reading.todo.pop_front() {
                    Some(todo) => break todo,
                    None => return None,
                }
            }
            match self.advance(&mut reading) {
                Ok(true) => {}
                Ok(false) => self.is_over.store(true, Release),
                Err(error) => self.end(&error),
            }
        };
        if !self.has_successor(scope, &mut reading) {
            self.settle(&mut reading);
            if let Some(front @ Todo::Finish(_)) = reading.todo.front_mut() {
                std::mem::swap(front, &mut todo);
            }
        }
        Some(todo)
    }

    /// Counts this thread as one without the turn. Returns whether another thread takes the turn.
    fn has_successor<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        reading: &mut Reading,
    ) -> bool {
        reading.busy += 1;
        if reading.busy == reading.threads && reading.threads < MAX_THREADS {
            // Without it, fewer are under way at a time.
            let thread = std::thread::Builder::new().name("nbd".into());
            if thread.spawn_scoped(scope, || self.work(scope)).is_ok() {
                reading.threads += 1;
            }
        }
        reading.busy < reading.threads
    }

    /// Begins what has come, and waits for what is next; false at the client's end.
    fn advance(&self, reading: &mut Reading) -> Result<bool, ConnectionError> {
        while reading.todo.is_empty() && reading.has_room() {
            match self.take(reading)? {
                Taken::Request => {}
                Taken::Nothing => break,
                Taken::End => return Ok(false),
            }
        }
        let was_full = !reading.has_room();
        reading.flow.send();
        if !reading.todo.is_empty() {
            // Requests for other threads may come without a pause in which `wait` hears donors.
            self.progress(reading, None);
        }
        self.reply(reading)?;
        // Requests that fit now may have arrived long ago.
        if !reading.todo.is_empty() || was_full && reading.has_room() {
            return Ok(true);
        }
        self.wait(reading)
    }

    /// Begins the next request, or leaves it to a thread of its own.
    fn take(&self, reading: &mut Reading) -> Result<Taken, ConnectionError> {
        let Some(head) = reading.input.bytes().first_chunk() else { return Ok(Taken::Nothing) };
        let request = Request::decode(head)?;
        let length = request.length as usize;
        let held = match request.command {
            Command::Disconnect => return Ok(Taken::End),
            Command::Read | Command::Write if length <= MAX_BYTES => length,
            _ => 0,
        };
        let data_bytes = if request.command == Command::Write { held } else { 0 };
        let has_come = reading.input.bytes().len() >= Request::BYTES + data_bytes;
        if !has_come && reading.input.holds(Request::BYTES + data_bytes) {
            return Ok(Taken::Nothing);
        }
        if !has_come || !self.bytes.try_take(held) {
            // The client may stop halfway, and holders of bytes may wait for requests in flight.
            self.await_donors(reading);
            if !reading.todo.is_empty() {
                return Ok(Taken::Nothing);
            }
            // It may take no answers before it has sent all of it.
            self.reply(reading)?;
            if !self.bytes.try_take(held) {
                self.settle(reading);
                // Then what it has not taken has its bytes for good.
                if self.is_over.load(Acquire) {
                    return Ok(Taken::End);
                }
                self.bytes.take(held);
            }
        }
        reading.input.consume(Request::BYTES);
        let asked = Asked { request, held };
        let may_begin = has_come
            && matches!(self.stream, Stream::Plain(_))
            && request.check(self.volume.size_bytes(), self.session).is_ok();
        let begun = match request.command {
            Command::Read if may_begin => {
                let data = reading.spare.take(held);
                reading.flow.read(asked, request.offset, held, data)
            }
            Command::Write if may_begin => {
                reading.flow.write(asked, request.offset, &reading.input.bytes()[..held])
            }
            _ => Begun::Not(asked),
        };
        match begun {
            Begun::UnderWay => reading.input.consume(data_bytes),
            Begun::Ended(ended) => {
                reading.input.consume(data_bytes);
                reading.ended(self.session, ended);
            }
            Begun::Not(asked) => {
                let mut buffer = reading.spare.take(held);
                reading.input.read_exact(&mut buffer[..data_bytes])?;
                reading.todo.push_back(Todo::Answer(asked, buffer));
            }
        }
        Ok(Taken::Request)
    }

    /// Waits until the client sends data or takes answers again, or until donors have answered.
    /// False if the client has gone.
    fn wait(&self, reading: &mut Reading) -> Result<bool, ConnectionError> {
        if reading.is_idle() {
            return Ok(reading.input.fill()? > 0);
        }
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, reading.has_room());
        wanted.set(PollFlags::OUT, reading.untaken > 0);
        let client = self.stream.socket().as_fd();
        let ([of_client], of_donors) = reading.flow.wait([(client, wanted)])?;
        if of_donors {
            self.progress(reading, None);
        }
        let has_sent = of_client.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
        Ok(!has_sent || !wanted.contains(PollFlags::IN) || reading.input.fill()? > 0)
    }

    /// Takes what donors have answered.
    fn progress(&self, reading: &mut Reading, wait: Option<Duration>) {
        let mut all = Vec::new();
        reading.flow.progress(wait, &mut |ended| all.push(ended));
        all.into_iter().for_each(|ended| reading.ended(self.session, ended));
    }

    /// Has the client take as many answers as it does.
    fn reply(&self, reading: &mut Reading) -> io::Result<()> {
        if reading.replies.is_empty() && reading.untaken == 0 {
            return Ok(());
        }
        let Ok(mut outbox) = self.writing.try_lock() else {
            // A thread has it that waits for the client.
            reading.untaken = reading.untaken.max(1);
            return Ok(());
        };
        self.send_some(reading, &mut outbox, SendFlags::DONTWAIT)
    }

    /// Waits until nothing is under way that others may wait for.
    fn await_donors(&self, reading: &mut Reading) {
        reading.flow.send();
        while !reading.flow.is_idle() {
            self.progress(reading, Some(WAIT));
        }
    }

    /// Waits for donors, then for the client to take its answers, unless writes must finish first.
    fn settle(&self, reading: &mut Reading) {
        self.await_donors(reading);
        let sent = match reading.todo.front() {
            // It has pages that others may wait for, and the client may take its time.
            Some(Todo::Finish(_)) => self.reply(reading),
            _ => self.send_some(reading, &mut self.writing(), SendFlags::empty()),
        };
        if let Err(error) = sent {
            self.end(&error.into());
            reading.untaken = 0;
        }
    }

    fn send_some(
        &self,
        reading: &mut Reading,
        outbox: &mut Outbox,
        flags: SendFlags,
    ) -> io::Result<()> {
        outbox.extend(reading.replies.drain(..));
        let sent = outbox.send(self.stream.socket(), flags, &mut |reply| {
            self.bytes.give_back(reply.held);
            reading.spare.keep(reply.into_buffer());
        });
        reading.untaken = outbox.len();
        sent
    }

    fn answer(&self, request: &Request, buffer: &mut [u8]) -> io::Result<()> {
        let Request { command, offset, length, cookie, .. } = *request;
        if let Err(error) = request.check(self.volume.size_bytes(), self.session) {
            return self.refuse(request, error, offset);
        }
        let volume = &self.volume;
        let done = match command {
            Command::Read => {
                let data = &mut buffer[..length as usize];
                return match volume.read(offset, data) {
                    Ok(contents) => self.give(request, data, contents),
                    Err((at, error)) => self.refuse(request, errno_of(&error), at),
                };
            }
            Command::BlockStatus => {
                let most = if request.flags & flag::REQ_ONE == 0 { MAX_EXTENTS } else { 1 };
                return match volume.extents(offset, length.into(), most) {
                    Ok(extents) => self.tell(cookie, &extents),
                    Err(error) => self.refuse(request, errno_of(&error), offset),
                };
            }
            Command::Write => volume.write(offset, &buffer[..length as usize]),
            Command::Trim => volume.trim(offset, length.into()),
            Command::WriteZeroes => {
                let allocate = request.flags & flag::NO_HOLE != 0;
                volume.write_zeroes(offset, length.into(), allocate)
            }
            Command::Flush => volume.flush(),
            Command::Disconnect | Command::Unknown(_) => unreachable!("not answered, or refused"),
        };
        let is_kept = request.flags & flag::FUA == 0 || command == Command::Flush;
        match done.and_then(|()| if is_kept { Ok(()) } else { volume.flush() }) {
            Ok(()) => self.send(&[&simple_reply(cookie, 0)]),
            Err(error) => self.refuse(request, errno_of(&error), offset),
        }
    }

    /// Answers a read.
    fn give(&self, request: &Request, data: &[u8], contents: Contents) -> io::Result<()> {
        let head = ReadHead::of(request, self.session, contents);
        self.send(&[head.bytes(), if head.has_data { data } else { &[] }])
    }

    /// Answers which bytes are stored.
    fn tell(&self, cookie: u64, extents: &[Extent]) -> io::Result<()> {
        let mut told = allocation::ID.to_be_bytes().to_vec();
        for extent in extents {
            let length = u32::try_from(extent.bytes).expect("no longer than the request");
            let state = match extent.contents {
                Contents::Data => 0,
                Contents::Hole => allocation::HOLE | allocation::ZERO,
            };
            told.extend_from_slice(&length.to_be_bytes());
            told.extend_from_slice(&state.to_be_bytes());
        }
        self.send(&[&only_chunk(cookie, chunk::BLOCK_STATUS, told.len() as u32), &told])
    }

    /// Answers that a request failed; at which byte, if it is a read that has.
    fn refuse(&self, request: &Request, error: u32, at: u64) -> io::Result<()> {
        let cookie = request.cookie;
        let is_structured = match request.command {
            Command::Read => self.session.structured,
            // Never answered otherwise.
            Command::BlockStatus => self.session.allocation,
            _ => false,
        };
        if !is_structured {
            return self.send(&[&simple_reply(cookie, error)]);
        }
        // The error, and how long a text follows.
        let mut what = [0; 6];
        what[..4].copy_from_slice(&error.to_be_bytes());
        match error {
            _ if request.command == Command::BlockStatus => {
                self.send(&[&only_chunk(cookie, chunk::ERROR, 6), &what])
            }
            errno::EINVAL => self.send(&[&only_chunk(cookie, chunk::ERROR, 6), &what]),
            _ => {
                let head = only_chunk(cookie, chunk::ERROR_OFFSET, 14);
                self.send(&[&head, &what, &at.to_be_bytes()])
            }
        }
    }

    fn send(&self, parts: &[&[u8]]) -> io::Result<()> {
        let mut outbox = self.writing();
        // Answers in the outbox go first: one of them may be half sent.
        outbox.send(self.stream.socket(), SendFlags::empty(), &mut |reply| {
            self.bytes.give_back(reply.held);
        })?;
        self.stream.send(parts)
    }

    /// Says once why the connection is closed, and closes it.
    fn end(&self, error: &ConnectionError) {
        if !self.is_over.swap(true, Release) {
            let volume = self.volume.name();
            tracing::warn!(volume, %error, "a client's connection is closed");
        }
        // Fails when it is closed, which is as well.
        let _ = rustix::net::shutdown(self.stream.socket(), rustix::net::Shutdown::Both);
    }

    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().expect("no thread panics as it reads")
    }

    fn writing(&self) -> MutexGuard<'_, Outbox> {
        self.writing.lock().expect("no thread panics as it writes")
    }
}

fn errno_of(error: &BlockError) -> u32 {
    match error {
        BlockError::Beyond { .. } => errno::EINVAL,
        BlockError::NoRoom(_) => errno::ENOSPC,
        BlockError::Spill(error) if error.is_full() => errno::ENOSPC,
        BlockError::Over => errno::ESHUTDOWN,
        BlockError::Unkept(_)
        | BlockError::Stuck
        | BlockError::Unflushed
        | BlockError::Damaged(_)
        | BlockError::Spill(_)
        | BlockError::Unheld(_)
        | BlockError::Pool(_) => errno::EIO,
    }
}

/// Bytes that may be taken by several, one of whom waits for them.
#[derive(Debug)]
struct Budget {
    free: Mutex<Free>,
    more: Condvar,
}

#[derive(Debug)]
struct Free {
    bytes: usize,
    is_waited_for: bool,
}

impl Budget {
    fn new(bytes: usize) -> Budget {
        Budget { free: Mutex::new(Free { bytes, is_waited_for: false }), more: Condvar::new() }
    }

    fn take(&self, bytes: usize) {
        let mut free = self.free();
        free.is_waited_for = true;
        let lacks = |free: &mut Free| free.bytes < bytes;
        let mut free = self.more.wait_while(free, lacks).expect("no thread panics with it");
        free.is_waited_for = false;
        free.bytes -= bytes;
    }

    /// Whether there were as many.
    fn try_take(&self, bytes: usize) -> bool {
        let mut free = self.free();
        let left = free.bytes.checked_sub(bytes);
        free.bytes = left.unwrap_or(free.bytes);
        left.is_some()
    }

    fn give_back(&self, bytes: usize) {
        let mut free = self.free();
        free.bytes += bytes;
        // To wake nobody is a system call, too.
        if free.is_waited_for {
            self.more.notify_one();
        }
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().expect("no thread panics with it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::wire::REQUEST_MAGIC;
    use crate::volume::tests::World;
    use hecaton_memory::PAGE_SIZE;
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    const PAGE_WRITE: Asked = Asked {
        request: Request {
            flags: 0,
            command: Command::Write,
            cookie: 1,
            offset: 0,
            length: PAGE_SIZE as u32,
        },
        held: 0,
    };

    /// The connection of a client to a volume whose first page is there, and the client.
    fn connect(world: &World) -> (Connection, UnixStream) {
        let volume = world.volume();
        volume.write(0, &[1; PAGE_SIZE]).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = Stream::Plain(Arc::new(File::from(OwnedFd::from(ours))));
        (Connection::new(volume, Session::default(), stream), theirs)
    }

    #[test]
    fn who_takes_no_answers_does_not_keep_writes_from_being_finished() {
        let mut world = World::new(1, 1, 100);
        let (connection, theirs) = connect(&world);
        let mut reading = connection.reading();
        // More than the socket has room for.
        let request = Request { command: Command::Read, length: 8 << 20, ..PAGE_WRITE.request };
        let data = vec![0; request.length as usize];
        let reply = Reply::of_read(&request, Session::default(), Contents::Data, data, 0);
        reading.replies.push(reply);
        let begun = reading.flow.write(PAGE_WRITE, 0, &[2; PAGE_SIZE]);
        assert!(matches!(begun, Begun::UnderWay));
        world.stop(0);
        let (done, is_done) = channel::<()>();
        std::thread::spawn(move || {
            let _ = is_done.recv_timeout(hecaton_testkit::patience());
            drop(theirs);
        });
        connection.settle(&mut reading);
        assert!(!connection.is_over.load(Acquire), "the client was waited for");
        assert!(matches!(reading.todo.front(), Some(Todo::Finish(_))));
        assert_eq!(reading.untaken, 1);
        drop(done);
    }

    #[test]
    fn what_donors_have_answered_is_seen_between_requests_of_threads_own() {
        let world = World::new(1, 1, 100);
        let (connection, mut theirs) = connect(&world);
        let mut reading = connection.reading();
        let begun = reading.flow.write(PAGE_WRITE, 0, &[2; PAGE_SIZE]);
        assert!(matches!(begun, Begun::UnderWay));
        let mut flush = [0; Request::BYTES];
        flush[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        flush[7] = 3;
        hecaton_testkit::wait_until("the write has ended", || {
            theirs.write_all(&flush).unwrap();
            reading.input.fill().unwrap();
            assert!(connection.advance(&mut reading).unwrap());
            assert!(matches!(reading.todo.pop_back(), Some(Todo::Answer(..))), "the flush");
            reading.flow.is_idle()
        });
    }
}
