//! The borrower's end: one thread's own connection to one donor.
//!
//! Nothing here waits unless its name or its documentation says so. Connecting and greeting go on
//! in [`Connection::progress`] too, so that a thread which serves faults from several donors is not
//! held up by one of them.
//!
//! A read of one page costs one send and one receive: the answer's head, sum and page come with one
//! `recv` into a buffer, and the page is handed on from there. Receiving straight into the place
//! where the page belongs was rejected, because the place is only known after the head, which would
//! make two calls of each answer.

mod patience;

pub use self::patience::Patience;
use crate::codec::{self, AnswerTables, HEAD_BYTES, Head, Malformed, WELCOME_BYTES};
use crate::inbox::{Inbox, RECEIVE_BYTES};
use crate::protocol::{
    Answer, HeldExtent, Hello, Load, MAX_PAGES, PageState, Refusal, Request, VERSIONS, Welcome,
};
use crate::seldom::Seldom;
use crate::socket::{self, More, Wait};
use crate::tls::{Destination, Handshake, Session, TlsError};
use crate::window::{Unexpected, Window, WindowLimits};
use hecaton_memory::{ExtentId, PAGE_SIZE, PageSignature, PageSum};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};
use tracing::warn;

/// Lines about donors that are not secure: there is an attempt every now and then.
static INSECURE: Seldom = Seldom::new();

/// Full receives in a row before other connections get their turn.
const MAX_RECEIVES: usize = 16;

/// Page data of so many bytes are not copied to be sent with others.
const LONG_BYTES: usize = 32 << 10;

/// Bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bounds on requests in flight.
    pub window: WindowLimits,
    /// How long [`Connection::open`] waits for the donor's welcome.
    pub connect: Duration,
    /// How long [`Connection::call`] waits for an answer.
    pub answer: Duration,
    /// How long a donor may take nothing of what is sent, or its host acknowledge nothing, before
    /// the connection counts as lost.
    pub stall: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            window: WindowLimits::default(),
            connect: Duration::from_secs(3),
            answer: Duration::from_secs(5),
            stall: Duration::from_secs(5),
        }
    }
}

/// Why a connection cannot be used, or used any more.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The socket said so.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The donor has closed the connection.
    #[error("the donor closed the connection")]
    Closed,
    /// The donor was silent for too long.
    #[error("the donor did not {0} within {1:?}")]
    TimedOut(&'static str, Duration),
    /// The donor does not welcome this borrower.
    #[error("the donor refused the connection")]
    Refused(#[source] Refusal),
    /// It is to be secure, and is not.
    #[error(transparent)]
    Tls(TlsError),
    /// The received bytes are not the page protocol.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The answer does not fit the request that is due.
    #[error(transparent)]
    Unexpected(#[from] Unexpected),
}

impl From<TlsError> for ConnectionError {
    fn from(error: TlsError) -> ConnectionError {
        match error {
            TlsError::Closed => ConnectionError::Closed,
            TlsError::Io(error) => ConnectionError::Io(error),
            error => ConnectionError::Tls(error),
        }
    }
}

/// A donor's answer, as it comes in.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// Some of the pages of a read. A read of many pages comes in several such events, in order;
    /// the one that brings the last page is the end of the request.
    Pages {
        /// Where in the request's list of pages these begin.
        from: usize,
        /// The sums that the donor keeps for them. Not verified here.
        sums: &'a [PageSum],
        /// Their contents, one after another, where they were received. Nobody needs them there
        /// afterwards: whoever has to decode them can do so in place.
        data: &'a mut [u8],
    },
    /// Written, discarded, filled, confirmed, repaired, freed, fenced or renewed.
    Done,
    /// The extent that was asked for.
    Allocated(ExtentId),
    /// The extents that the donor holds for the space.
    Held(&'a [HeldExtent]),
    /// The states of the pages of a run.
    Verified(&'a [PageState]),
    /// The signatures of the pages of a run.
    Signed(&'a [PageSignature]),
    /// Not done, and why.
    Refused(Refusal),
}

/// A donor's answer, in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pages of a read.
    Pages {
        /// The sums that the donor keeps for them. Not verified here.
        sums: Vec<PageSum>,
        /// Their contents, one after another.
        data: Vec<u8>,
    },
    /// Written, discarded, filled, confirmed, repaired, freed, fenced or renewed.
    Done,
    /// The extent that was asked for.
    Allocated(ExtentId),
    /// The extents that the donor holds for the space.
    Held(Vec<HeldExtent>),
    /// The states of the pages of a run.
    Verified(Vec<PageState>),
    /// The signatures of the pages of a run.
    Signed(Vec<PageSignature>),
    /// Not done, and why.
    Refused(Refusal),
}

/// One thread's own connection to one donor, for one space.
pub struct Connection {
    socket: OwnedFd,
    /// Where it is protected.
    session: Option<Box<Session>>,
    phase: Phase,
    options: Options,
    window: Window,
    load: Load,
    inbox: Inbox,
    tables: AnswerTables,
    delivery: Option<Delivery>,
    has_undelivered: bool,
    /// Requests that are entered and not sent yet.
    held: Vec<u8>,
    head: Vec<u8>,
    parts: Vec<libc::iovec>,
}

// SAFETY: the pointers in `parts` are only set and used within one call of `send`.
unsafe impl Send for Connection {}

enum Phase {
    /// The kernel connects, then the greetings pass. `gate` is an epoll instance with the socket in
    /// it, so that whoever waits for the connection may wait for readability throughout.
    Opening {
        gate: OwnedFd,
        hello: Vec<u8>,
        sent: usize,
        connected: bool,
    },
    Open(Welcome),
    Broken,
}

impl Connection {
    /// Begins to connect, and returns at once. [`Connection::progress`] does the rest.
    pub fn start(
        to: impl Into<Destination>,
        hello: &Hello,
        options: &Options,
    ) -> Result<Connection, ConnectionError> {
        let Destination { address, tls } = to.into();
        let session = tls.as_ref().map(Session::client).transpose()?.map(Box::new);
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(io::Error::from)?;
        socket::prepare(socket.as_fd(), options.stall)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let gate = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        let events = epoll::EventFlags::OUT;
        epoll::add(&gate, &socket, epoll::EventData::new_u64(0), events)
            .map_err(io::Error::from)?;
        let hello = codec::encode_hello(hello).to_vec();
        Ok(Connection {
            socket,
            session,
            phase: Phase::Opening { gate, hello, sent: 0, connected: false },
            options: *options,
            window: Window::new(options.window),
            load: Load::default(),
            inbox: Inbox::new(&options.window),
            tables: AnswerTables::default(),
            delivery: None,
            has_undelivered: false,
            held: Vec::new(),
            head: Vec::with_capacity(HEAD_BYTES + MAX_PAGES * 8),
            parts: Vec::with_capacity(2 + MAX_PAGES),
        })
    }

    /// Connects and waits for the donor's welcome, [`Options::connect`] at most.
    pub fn open(
        to: impl Into<Destination>,
        hello: &Hello,
        options: &Options,
    ) -> Result<Connection, ConnectionError> {
        Connection::open_within(&mut Patience::new(options.connect), to, hello, options)
    }

    /// The same, and waits for as long as the patience lasts.
    pub fn open_within(
        patience: &mut Patience,
        to: impl Into<Destination>,
        hello: &Hello,
        options: &Options,
    ) -> Result<Connection, ConnectionError> {
        let mut connection = Connection::start(to, hello, options)?;
        while connection.welcome().is_none() {
            if patience.poll(connection.as_fd(), PollFlags::IN)?.is_empty() {
                return Err(ConnectionError::TimedOut("welcome this borrower", patience.limit()));
            }
            connection.progress(&mut |_, _| {})?;
        }
        Ok(connection)
    }

    /// The donor's welcome, once it is there. Requests may be submitted from then on.
    pub fn welcome(&self) -> Option<&Welcome> {
        match &self.phase {
            Phase::Open(welcome) => Some(welcome),
            Phase::Opening { .. } | Phase::Broken => None,
        }
    }

    /// Whether the version that both speak is known, and does not have the request.
    pub fn lacks(&self, request: &Request<'_>) -> bool {
        self.welcome().is_some_and(|welcome| welcome.version < request.since())
    }

    /// The donor's free pages and load, as of its latest answer.
    pub fn load(&self) -> Load {
        self.load
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.window.len()
    }

    /// Whether the window has room for the request.
    pub fn has_room(&self, request: &Request<'_>) -> bool {
        self.window.has_room(request)
    }

    /// Whether there are answers that were received while a submission waited: the descriptor need
    /// not become readable for them, and [`Connection::progress`] is to be called all the same.
    pub fn has_undelivered(&self) -> bool {
        self.has_undelivered
    }

    /// Sends a request. `tag` comes back with every event of its answer. `data` is the page data of
    /// a [`Request::Write`], in any number of pieces; the kernel has all of it on return.
    ///
    /// Waits only while the socket takes no more, [`Options::stall`] at most. Meanwhile it receives
    /// what the donor answers, because a donor that cannot get rid of its answers takes no requests
    /// either; the window is what bounds that.
    ///
    /// # Panics
    /// If the connection is not open, the window is full, or `data` has other bytes than the
    /// request has pages.
    pub fn submit(
        &mut self,
        tag: u64,
        request: Request<'_>,
        data: &[&[u8]],
    ) -> Result<(), ConnectionError> {
        self.enter(tag, &request, data)?;
        let outcome = self.send(data);
        self.note(outcome)
    }

    /// Enters a request as [`Connection::submit`] does, and keeps a copy until
    /// [`Connection::release`] or the next submitted request: one call then sends many short ones.
    /// A long one is sent at once with those before it, as far as the socket takes it.
    ///
    /// # Panics
    /// As [`Connection::submit`].
    pub fn hold(
        &mut self,
        tag: u64,
        request: Request<'_>,
        data: &[&[u8]],
    ) -> Result<(), ConnectionError> {
        self.enter(tag, &request, data)?;
        self.held.append(&mut self.head);
        let data_bytes: usize = data.iter().map(|part| part.len()).sum();
        if data_bytes < LONG_BYTES || self.session.is_some() {
            data.iter().for_each(|part| self.held.extend_from_slice(part));
            return Ok(());
        }
        let outcome = self.send_some(data);
        self.note(outcome)
    }

    /// Sends what is held, as far as the socket takes it; a protected connection waits as
    /// [`Connection::submit`] does.
    pub fn release(&mut self) -> Result<(), ConnectionError> {
        if self.held.is_empty() {
            return Ok(());
        }
        let outcome = match self.session {
            None => self.send_some(&[]),
            Some(_) => self.send(&[]),
        };
        self.note(outcome)
    }

    /// Whether something is held.
    pub fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether what it carries is protected.
    pub fn is_secure(&self) -> bool {
        self.session.is_some()
    }

    /// Enters a request, and leaves its head to be sent.
    fn enter(
        &mut self,
        tag: u64,
        request: &Request<'_>,
        data: &[&[u8]],
    ) -> Result<(), ConnectionError> {
        assert!(matches!(self.phase, Phase::Open(_)), "the connection is not open");
        let data_bytes: usize = data.iter().map(|part| part.len()).sum();
        let expected = match request {
            Request::Write { pages, .. } => pages.len() * PAGE_SIZE,
            _ => 0,
        };
        assert_eq!(data_bytes, expected, "other bytes than pages");
        if let Some(session) = &mut self.session {
            let checked = session.check().map_err(ConnectionError::from);
            self.note(checked)?;
        }
        let id = self.window.admit(tag, request);
        codec::encode_request(request, id, &mut self.head);
        Ok(())
    }

    /// Receives what has come, without waiting, and hands it to `sink` with the tag of its request.
    /// An error is the end of the connection; what was under way has no answer then.
    pub fn progress(
        &mut self,
        sink: &mut dyn FnMut(u64, Event<'_>),
    ) -> Result<(), ConnectionError> {
        let outcome = match self.phase {
            Phase::Opening { .. } => self.greet(),
            Phase::Open(_) => self.receive(sink),
            Phase::Broken => Err(ConnectionError::Closed),
        };
        self.note(outcome)
    }

    /// Sends a request and waits for its answer, [`Options::answer`] at most. For control requests:
    /// it allocates, and events of other requests that come meanwhile are dropped.
    pub fn call(
        &mut self,
        request: Request<'_>,
        data: &[&[u8]],
    ) -> Result<Outcome, ConnectionError> {
        self.call_within(&mut Patience::new(self.options.answer), request, data)
    }

    /// The same, and waits for as long as the patience lasts.
    pub fn call_within(
        &mut self,
        patience: &mut Patience,
        request: Request<'_>,
        data: &[&[u8]],
    ) -> Result<Outcome, ConnectionError> {
        const TAG: u64 = u64::MAX;
        let pages_asked = match request {
            Request::Read { pages, .. } => pages.len(),
            _ => 0,
        };
        self.submit(TAG, request, data)?;
        let (mut all_sums, mut all_data) = (Vec::new(), Vec::new());
        let mut outcome = None;
        while outcome.is_none() {
            let is_ready =
                self.has_undelivered() || !patience.poll(self.as_fd(), PollFlags::IN)?.is_empty();
            if !is_ready {
                self.phase = Phase::Broken;
                return Err(ConnectionError::TimedOut("answer", patience.limit()));
            }
            self.progress(&mut |tag, event| {
                if tag != TAG {
                    return;
                }
                outcome = match event {
                    Event::Pages { sums, data, .. } => {
                        all_sums.extend_from_slice(sums);
                        all_data.extend_from_slice(data);
                        (all_sums.len() == pages_asked).then(|| Outcome::Pages {
                            sums: std::mem::take(&mut all_sums),
                            data: std::mem::take(&mut all_data),
                        })
                    }
                    Event::Done => Some(Outcome::Done),
                    Event::Allocated(extent) => Some(Outcome::Allocated(extent)),
                    Event::Held(lines) => Some(Outcome::Held(lines.to_vec())),
                    Event::Verified(states) => Some(Outcome::Verified(states.to_vec())),
                    Event::Signed(signatures) => Some(Outcome::Signed(signatures.to_vec())),
                    Event::Refused(refusal) => Some(Outcome::Refused(refusal)),
                };
            })?;
        }
        outcome.ok_or(ConnectionError::Closed)
    }

    /// Marks the connection as broken after an error, and logs errors of the protocol and of TLS.
    fn note(&mut self, outcome: Result<(), ConnectionError>) -> Result<(), ConnectionError> {
        if let Err(error) = &outcome {
            let peer = || sockopt_peer(&self.socket);
            match error {
                ConnectionError::Malformed(_) | ConnectionError::Unexpected(_) => {
                    warn!(peer = peer(), %error, "connection closed: malformed frame");
                }
                ConnectionError::Tls(_) => {
                    if let Some(unsaid) = INSECURE.may_say(Instant::now()) {
                        warn!(peer = peer(), unsaid, %error, "connection closed: it is not secure");
                    }
                }
                _ => {}
            }
            self.phase = Phase::Broken;
        }
        outcome
    }

    fn greet(&mut self) -> Result<(), ConnectionError> {
        let Phase::Opening { gate, hello, sent, connected } = &mut self.phase else {
            return Ok(());
        };
        if !*connected {
            let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
            match poll(&mut fds, Some(&Timespec::default())) {
                Ok(0) | Err(Errno::INTR) => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            sockopt::socket_error(&self.socket)
                .map_err(io::Error::from)?
                .map_err(io::Error::from)?;
            *connected = true;
        }
        let waits_for = match &mut self.session {
            Some(session) => greet_securely(session, self.socket.as_fd(), hello, sent)?,
            None => greet_plainly(self.socket.as_fd(), hello, sent)?,
        };
        let events = match waits_for {
            Handshake::Writing => epoll::EventFlags::OUT,
            Handshake::Reading | Handshake::Done => epoll::EventFlags::IN,
        };
        epoll::modify(&*gate, &self.socket, epoll::EventData::new_u64(0), events)
            .map_err(io::Error::from)?;
        if waits_for != Handshake::Done {
            return Ok(());
        }
        self.inbox.receive(self.socket.as_fd(), self.session.as_deref_mut())?;
        let Some((welcome, _)) = self.inbox.bytes().split_first_chunk::<WELCOME_BYTES>() else {
            return Ok(());
        };
        let welcome = codec::decode_welcome(welcome)?.map_err(ConnectionError::Refused)?;
        if welcome.version < VERSIONS.0 || welcome.version > VERSIONS.1 {
            return Err(Malformed::Field("version").into());
        }
        self.inbox.consume(WELCOME_BYTES);
        self.inbox.compact();
        self.load = welcome.load;
        self.phase = Phase::Open(welcome);
        Ok(())
    }

    fn receive(&mut self, sink: &mut dyn FnMut(u64, Event<'_>)) -> Result<(), ConnectionError> {
        self.deliver(sink)?;
        for turn in 1.. {
            let received = self.inbox.receive(self.socket.as_fd(), self.session.as_deref_mut())?;
            self.deliver(sink)?;
            if self.session.as_ref().is_some_and(|session| session.has_spare()) {
                // The socket may be empty, and would not tell of it.
                continue;
            }
            // A short receive has emptied the socket. Asking again would cost a call to be told so.
            if received < RECEIVE_BYTES || turn >= MAX_RECEIVES {
                break;
            }
        }
        Ok(())
    }

    /// Hands on everything that the receiver has whole.
    fn deliver(&mut self, sink: &mut dyn FnMut(u64, Event<'_>)) -> Result<(), ConnectionError> {
        loop {
            if let Some(delivery) = &mut self.delivery {
                let bytes = self.inbox.bytes_mut();
                let from = delivery.given;
                let pages = (bytes.len() / PAGE_SIZE).min(delivery.asked - from);
                if pages == 0 {
                    break;
                }
                delivery.given += pages;
                let (tag, last) = (delivery.tag, delivery.given == delivery.asked);
                let sums = &self.tables.sums()[from..from + pages];
                let data = &mut bytes[..pages * PAGE_SIZE];
                sink(tag, Event::Pages { from, sums, data });
                self.inbox.consume(pages * PAGE_SIZE);
                if last {
                    self.delivery = None;
                    self.window.settle();
                }
                continue;
            }
            let bytes = self.inbox.bytes();
            let Some((head, _)) = bytes.split_first_chunk::<HEAD_BYTES>() else { break };
            let head = Head::parse(head)?;
            let length = HEAD_BYTES + head.table_bytes();
            let Some(frame) = bytes.get(..length) else { break };
            let (answer, load) = codec::decode_answer(&head, frame, &mut self.tables)?;
            let tag = self.window.check(head.id(), &answer)?;
            self.load = load;
            let event = match answer {
                Answer::Pages(sums) => {
                    let asked = sums.len();
                    self.delivery = Some(Delivery { tag, asked, given: 0 });
                    self.inbox.consume(length);
                    continue;
                }
                Answer::Done => Event::Done,
                Answer::Allocated(extent) => Event::Allocated(extent),
                Answer::Held(lines) => Event::Held(lines),
                Answer::Verified(states) => Event::Verified(states),
                Answer::Signed(signatures) => Event::Signed(signatures),
                Answer::Refused(refusal) => Event::Refused(refusal),
            };
            sink(tag, event);
            self.inbox.consume(length);
            self.window.settle();
        }
        self.inbox.compact();
        self.has_undelivered = false;
        Ok(())
    }

    /// Sends what is held, the head, and then `data`.
    fn send(&mut self, data: &[&[u8]]) -> Result<(), ConnectionError> {
        let outcome = self.send_parts(data);
        self.held.clear();
        self.head.clear();
        outcome
    }

    /// Sends what is held and then `data`, without waiting, and holds the rest.
    fn send_some(&mut self, data: &[&[u8]]) -> Result<(), ConnectionError> {
        self.parts.clear();
        self.parts.push(socket::iovec(&self.held));
        self.parts.extend(data.iter().map(|part| socket::iovec(part)));
        let (mut from, mut sent) = (0, 0);
        while from < self.parts.len() {
            let until = self.parts.len().min(from + libc::UIO_MAXIOV as usize);
            let parts = &self.parts[from..until];
            // SAFETY: what is held lives in `self`, and `data` is borrowed for the whole call.
            match unsafe { socket::send(self.socket.as_fd(), parts, Wait::No, More::Unknown) } {
                Ok(count) => {
                    sent += count;
                    from += socket::advance(&mut self.parts[from..], count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        let of_held = sent.min(self.held.len());
        self.held.drain(..of_held);
        let mut of_data = sent - of_held;
        for part in data {
            let skipped = of_data.min(part.len());
            self.held.extend_from_slice(&part[skipped..]);
            of_data -= skipped;
        }
        Ok(())
    }

    fn send_parts(&mut self, data: &[&[u8]]) -> Result<(), ConnectionError> {
        self.parts.clear();
        let heads = [&self.held, &self.head].into_iter().filter(|head| !head.is_empty());
        self.parts.extend(heads.map(|head| socket::iovec(head)));
        self.parts.extend(data.iter().map(|part| socket::iovec(part)));
        let mut from = 0;
        while let Some(session) = self.session.as_deref_mut() {
            if from < self.parts.len() {
                // SAFETY: the heads live in `self`, and `data` is borrowed for the whole call.
                let sealed = unsafe { session.seal(&self.parts[from..])? };
                from += socket::advance(&mut self.parts[from..], sealed);
                if sealed > 0 && from < self.parts.len() {
                    continue;
                }
            }
            // All of it is sealed, or as much as is sent at once.
            if !session.flush(self.socket.as_fd(), Wait::No)? {
                self.wait_to_send()?;
            } else if from == self.parts.len() {
                return Ok(());
            }
        }
        while from < self.parts.len() {
            // The kernel takes no more than this many at once.
            let until = self.parts.len().min(from + libc::UIO_MAXIOV as usize);
            let parts = &self.parts[from..until];
            // SAFETY: the heads live in `self`, and `data` is borrowed for the whole call.
            match unsafe { socket::send(self.socket.as_fd(), parts, Wait::No, More::Unknown) } {
                Ok(sent) => from += socket::advance(&mut self.parts[from..], sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_to_send()?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until the socket takes more, and keeps what comes in meanwhile.
    fn wait_to_send(&mut self) -> Result<(), ConnectionError> {
        let mut patience = Patience::new(self.options.stall);
        loop {
            let mut events = PollFlags::OUT;
            if self.inbox.has_space() {
                events |= PollFlags::IN;
            }
            let ready = patience.poll(self.socket.as_fd(), events)?;
            if ready.is_empty() {
                return Err(ConnectionError::TimedOut("take a request", self.options.stall));
            }
            if ready.contains(PollFlags::IN) {
                self.inbox.receive(self.socket.as_fd(), self.session.as_deref_mut())?;
                self.has_undelivered = true;
            }
            // Errors and hang-ups show in the send that follows.
            if ready.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP) {
                return Ok(());
            }
        }
    }
}

impl AsFd for Connection {
    /// Readable whenever [`Connection::progress`] has something to do. It is another descriptor
    /// once the connection is open than before.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.phase {
            Phase::Opening { gate, .. } => gate.as_fd(),
            Phase::Open(_) | Phase::Broken => self.socket.as_fd(),
        }
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Sends the rest of the greeting, as far as the socket takes it.
fn greet_plainly(
    socket: BorrowedFd<'_>,
    hello: &[u8],
    sent: &mut usize,
) -> Result<Handshake, ConnectionError> {
    while *sent < hello.len() {
        let parts = [socket::iovec(&hello[*sent..])];
        // SAFETY: the greeting is borrowed for the whole call.
        match unsafe { socket::send(socket, &parts, Wait::No, More::Unknown) } {
            Ok(count) => *sent += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(Handshake::Writing);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Handshake::Done)
}

/// Shakes hands, and sends the greeting when it is known who has it.
fn greet_securely(
    session: &mut Session,
    socket: BorrowedFd<'_>,
    hello: &[u8],
    sent: &mut usize,
) -> Result<Handshake, ConnectionError> {
    while *sent < hello.len() {
        match session.shake_hands(socket, Wait::No)? {
            Handshake::Done => {
                let parts = [socket::iovec(&hello[*sent..])];
                // SAFETY: the greeting is borrowed for the whole call.
                *sent += unsafe { session.seal(&parts)? };
            }
            Handshake::Writing => return Ok(Handshake::Writing),
            Handshake::Reading => match session.fetch(socket, Wait::No) {
                Ok(_) => {}
                Err(TlsError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Handshake::Reading);
                }
                Err(error) => return Err(error.into()),
            },
        }
    }
    Ok(if session.flush(socket, Wait::No)? { Handshake::Done } else { Handshake::Writing })
}

/// An answer whose pages are coming in.
struct Delivery {
    tag: u64,
    asked: usize,
    given: usize,
}

fn sockopt_peer(socket: &OwnedFd) -> String {
    match rustix::net::getpeername(socket) {
        Ok(Some(address)) => SocketAddr::try_from(address).map_or("?".into(), |a| a.to_string()),
        _ => "?".into(),
    }
}
