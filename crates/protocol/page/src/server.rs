//! The donor's end: one blocking thread for each connection.
//!
//! Blocking threads and not a runtime, because a page request then costs one wake-up: a 4 KiB get
//! over loopback takes 20 µs this way and 33 µs through tokio.
//!
//! Payload goes two ways:
//! - *Out*: a read is answered by one gathered `sendmsg` from the memory that holds the pages. No
//!   copy besides the kernel's, but with TLS, which copies them into what it encrypts.
//! - *In*: a write is received into the connection's own buffer, checked, and copied. The copy
//!   (about 0.2 µs a page, its source still in the cache) buys that no unverified byte is ever in
//!   the extent: [`Refusal::Corrupt`] writes nothing, and neither does a connection that is cut in
//!   the middle of a frame.
//!
//! A malformed frame ends its connection, with one line in the log; the other connections do not
//! notice.

use crate::codec::{
    self, HEAD_BYTES, HELLO_BYTES, Head, MAX_FRAME_BYTES, Malformed, RequestTables,
};
use crate::protocol::{
    Answer, HeldExtent, Hello, Load, PageState, Refusal, Request, VERSIONS, Welcome,
};
use crate::seldom::Seldom;
use crate::socket::{self, More, Wait};
use crate::tls::{Received, Session, TlsError};
use crate::vigil::Vigil;
use hecaton_memory::{ExtentId, PAGE_SIZE, PageSignature, PageSum, SpaceId};
use hecaton_pki::CredentialsDir;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// Lines about peers that are not secure: anybody can make one.
static INSECURE: Seldom = Seldom::new();

/// Carries out the requests to a donor.
///
/// The server checks frames, versions and lanes; the service knows extents and epochs. The service
/// must compare the connection's epoch with the space's fence on **every** request, and hold that
/// fence shared until the request's effect is done. Otherwise a write that was checked just before
/// a [`Request::Fence`] lands just after it.
pub trait Service: Send + Sync + 'static {
    /// State of the service for each connection; dropped when the connection ends.
    type Session: Send;

    /// Admits a borrower, or refuses it. The server sets [`Welcome::version`].
    fn hello(&self, hello: &Hello, caller: Caller<'_>)
    -> Result<(Welcome, Self::Session), Refusal>;

    /// Does one request and answers it through `reply`. `data` holds the page data of a
    /// [`Request::Write`], as many pages as it names, not yet verified; it is empty for the others.
    fn handle(
        &self,
        session: &mut Self::Session,
        request: Request<'_>,
        data: &[u8],
        reply: Reply<'_>,
    ) -> Replied;
}

/// The peer that connects.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// Where it connects from.
    pub address: SocketAddr,
    /// Node that its certificate names; none where connections are not protected.
    pub node: Option<&'a str>,
    /// The version that both speak.
    pub version: u16,
}

/// Limits on the connections of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time; one more is refused with [`Refusal::Busy`]. Each has a thread, and up
    /// to 1.1 MiB of buffer if it writes.
    pub connections: usize,
    /// A borrower that has not sent its whole [`Hello`] by then is cut off.
    pub handshake: Duration,
    /// A borrower that stops in the middle of a frame, or does not take its answers, is cut off
    /// after this long.
    pub stall: Duration,
    /// A connection without any request for this long is closed; the borrower opens it again when
    /// it next needs it.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            idle: Duration::from_secs(600),
        }
    }
}

/// The one answer that a request gets: every method sends it and turns the reply into [`Replied`].
/// When sending fails the connection ends after [`Service::handle`] has returned.
pub struct Reply<'a> {
    wire: &'a mut Wire,
    id: u64,
    version: u16,
    pages_asked: usize,
}

/// Proof that a request was answered, once.
#[must_use]
pub struct Replied {
    outcome: io::Result<()>,
}

impl Reply<'_> {
    /// The request is done.
    pub fn done(self, load: Load) -> Replied {
        self.answer(&Answer::Done, load)
    }

    /// The request is not done.
    pub fn refused(self, refusal: Refusal, load: Load) -> Replied {
        let refusal = refusal.in_version(self.version);
        self.answer(&Answer::Refused(refusal), load)
    }

    /// The extent that was asked for.
    pub fn allocated(self, extent: ExtentId, load: Load) -> Replied {
        self.answer(&Answer::Allocated(extent), load)
    }

    /// The extents that the donor holds for the space.
    pub fn held(self, lines: &[HeldExtent], load: Load) -> Replied {
        self.answer(&Answer::Held(lines), load)
    }

    /// The states of the pages of a run.
    pub fn verified(self, states: &[PageState], load: Load) -> Replied {
        self.answer(&Answer::Verified(states), load)
    }

    /// The signatures of the pages of a run.
    pub fn signed(self, signatures: &[PageSignature], load: Load) -> Replied {
        self.answer(&Answer::Signed(signatures), load)
    }

    /// The pages of a read with their sums, sent straight from where they are. Neighbouring pages
    /// may stand in one `iovec`.
    ///
    /// # Safety
    /// Every `iovec` must point to memory that stays mapped during the call. It may be written by
    /// others meanwhile: what is sent then is undefined, but the page's sum tells.
    ///
    /// # Panics
    /// If the sums or the bytes are not as many as the request asked for.
    pub unsafe fn pages(self, sums: &[PageSum], data: &[libc::iovec], load: Load) -> Replied {
        let bytes: usize = data.iter().map(|part| part.iov_len).sum();
        assert_eq!(sums.len(), self.pages_asked, "other sums than pages asked for");
        assert_eq!(bytes, self.pages_asked * PAGE_SIZE, "other bytes than pages asked for");
        codec::encode_answer(&Answer::Pages(sums), self.id, load, &mut self.wire.head);
        // SAFETY: the caller vouches for `data`.
        Replied { outcome: unsafe { self.wire.send(data) } }
    }

    fn answer(self, answer: &Answer<'_>, load: Load) -> Replied {
        codec::encode_answer(answer, self.id, load, &mut self.wire.head);
        // SAFETY: there is no memory besides the head, which the wire owns.
        Replied { outcome: unsafe { self.wire.send(&[]) } }
    }
}

/// A connection, with the buffers to send from.
struct Wire {
    stream: Arc<TcpStream>,
    /// Where it is protected.
    session: Option<Session>,
    head: Vec<u8>,
    parts: Vec<libc::iovec>,
    /// Whether the answer that is sent is followed by another one at once.
    more: More,
}

// SAFETY: the pointers in `parts` are only set and used within one call of `send`.
unsafe impl Send for Wire {}

impl Wire {
    /// Sends the head and then `data`, waiting as long as the socket's timeout lets it.
    ///
    /// # Safety
    /// As for [`socket::send`]; with TLS, memory may change meanwhile as [`Session::seal`] says.
    unsafe fn send(&mut self, data: &[libc::iovec]) -> io::Result<()> {
        self.parts.clear();
        self.parts.push(socket::iovec(&self.head));
        self.parts.extend_from_slice(data);
        let mut from = 0;
        while from < self.parts.len() {
            let parts = &self.parts[from..];
            let sent = match &mut self.session {
                // SAFETY: the head lives in `self` and the caller vouches for the rest.
                None => unsafe { socket::send(self.stream.as_fd(), parts, Wait::Yes, self.more)? },
                Some(session) => {
                    // SAFETY: the same.
                    let sealed = unsafe { session.seal(parts).map_err(io_error)? };
                    if sealed == 0 {
                        session.flush(self.stream.as_fd(), Wait::Yes)?;
                    }
                    sealed
                }
            };
            from += socket::advance(&mut self.parts[from..], sent);
        }
        match &mut self.session {
            None => Ok(()),
            Some(session) => session.flush(self.stream.as_fd(), Wait::Yes).map(drop),
        }
    }

    /// One receive.
    fn receive(&mut self, buffer: &mut [u8], wait: Wait) -> Result<Received, TlsError> {
        let Some(session) = &mut self.session else {
            return match socket::receive(&*self.stream, buffer, wait)? {
                0 => Err(TlsError::Closed),
                count => Ok(Received { raw: count, plain: count }),
            };
        };
        session.receive(self.stream.as_fd(), buffer, wait)
    }

    fn is_amid_record(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_amid_record)
    }
}

fn io_error(error: TlsError) -> io::Error {
    match error {
        TlsError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    address: SocketAddr,
    wake: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the connections that come to `listener`, each on a thread of its own. With
    /// `credentials`, connections must be secure and come from nodes.
    pub fn start<S: Service>(
        listener: TcpListener,
        service: Arc<S>,
        limits: Limits,
        credentials: Option<Arc<CredentialsDir>>,
    ) -> io::Result<Server> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let shared = Arc::new(Shared { service, limits, credentials, peers: Mutex::default() });
        let acceptor = thread::Builder::new().name("donor-accept".into()).spawn({
            let wake = wake.clone();
            move || accept_until_woken(&listener, &wake, &shared)
        })?;
        Ok(Server { address, wake, acceptor: Some(acceptor) })
    }

    /// Where the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, ends all connections, and returns when their threads are done.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        // The counter of a fresh eventfd has room, so that this cannot fail.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if acceptor.join().is_err() {
            warn!(address = %self.address, "the accepting thread of a donor had panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

struct Shared<S> {
    service: Arc<S>,
    limits: Limits,
    credentials: Option<Arc<CredentialsDir>>,
    peers: Mutex<Peers>,
}

#[derive(Default)]
struct Peers {
    next: u64,
    all: HashMap<u64, Arc<Peer>>,
    lanes: HashMap<(SpaceId, u64), Arc<Peer>>,
}

/// One connection, as the others see it.
struct Peer {
    stream: Arc<TcpStream>,
    cut: AtomicBool,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Peer {
    /// Makes the connection's thread stop at its next step. Requests that it has received but not
    /// begun are not done.
    fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn wait_until_ended(&self, deadline: Instant) -> bool {
        let mut ended = lock(&self.ended);
        while !*ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            ended = self.end.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// The values behind these locks are whole between any two statements: a panic in a service must
/// not take the server down with it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept_until_woken<S: Service>(listener: &TcpListener, wake: &OwnedFd, shared: &Arc<Shared<S>>) {
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(wake, PollFlags::IN)];
        // An interrupted poll reports nothing, and is begun again.
        let _ = poll(&mut fds, None);
        if !fds[1].revents().is_empty() {
            break;
        }
        match listener.accept() {
            Ok((stream, address)) => admit(shared, stream, address),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Out of descriptors, most likely: the connection stays in the queue, and the poll
                // would return at once.
                warn!(%error, "cannot accept a connection");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
    let peers: Vec<_> = lock(&shared.peers).all.values().cloned().collect();
    peers.iter().for_each(|peer| peer.cut());
    for peer in peers {
        while !peer.wait_until_ended(Instant::now() + Duration::from_secs(60)) {
            warn!("a connection does not end: its request is still in service");
        }
    }
}

fn admit<S: Service>(shared: &Arc<Shared<S>>, stream: TcpStream, address: SocketAddr) {
    let stream = Arc::new(stream);
    let peer = Arc::new(Peer {
        stream: stream.clone(),
        cut: AtomicBool::new(false),
        ended: Mutex::new(false),
        end: Condvar::new(),
    });
    let number = {
        let mut peers = lock(&shared.peers);
        if peers.all.len() >= shared.limits.connections {
            drop(peers);
            warn!(
                %address,
                limit = shared.limits.connections,
                "connection refused: there are as many as the limit allows"
            );
            if shared.credentials.is_none() {
                refuse_for_want_of_room(&stream);
            }
            return;
        }
        peers.next += 1;
        let number = peers.next;
        peers.all.insert(number, peer.clone());
        number
    };
    let guard = Registered { shared: shared.clone(), peer, number, lane: None };
    let spawned = thread::Builder::new()
        .name(format!("donor-{number}"))
        .stack_size(512 << 10)
        .spawn(move || serve(guard, stream, address));
    if let Err(error) = spawned {
        warn!(%address, %error, "no thread for a connection");
    }
}

/// Best effort: a borrower whose greeting is still unread here may see a reset instead.
fn refuse_for_want_of_room(stream: &TcpStream) {
    let refusal = codec::encode_welcome(&Err(Refusal::Busy));
    let parts = [socket::iovec(&refusal)];
    // SAFETY: the refusal is on this stack.
    let _ = unsafe { socket::send(stream.as_fd(), &parts, Wait::No, More::Unknown) };
    let _ = stream.shutdown(Shutdown::Write);
}

/// Takes the connection from the tables when its thread ends, in whatever way that happens.
struct Registered<S: Service> {
    shared: Arc<Shared<S>>,
    peer: Arc<Peer>,
    number: u64,
    lane: Option<(SpaceId, u64)>,
}

impl<S: Service> Registered<S> {
    /// Ends the earlier connection of the lane and takes its place.
    fn take_lane(&mut self, lane: (SpaceId, u64)) -> Result<(), Refusal> {
        let earlier = lock(&self.shared.peers).lanes.insert(lane, self.peer.clone());
        self.lane = Some(lane);
        if let Some(earlier) = earlier {
            earlier.cut();
            if !earlier.wait_until_ended(Instant::now() + self.shared.limits.handshake) {
                return Err(Refusal::Busy);
            }
        }
        Ok(())
    }
}

impl<S: Service> Drop for Registered<S> {
    fn drop(&mut self) {
        let mut peers = lock(&self.shared.peers);
        peers.all.remove(&self.number);
        if let Some(lane) = self.lane
            && peers.lanes.get(&lane).is_some_and(|peer| Arc::ptr_eq(peer, &self.peer))
        {
            peers.lanes.remove(&lane);
        }
        drop(peers);
        *lock(&self.peer.ended) = true;
        self.peer.end.notify_all();
    }
}

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("closed by the borrower")]
    Closed,
    #[error("idle for too long")]
    Idle,
    #[error("stopped by this side")]
    Cut,
    #[error("refused: {0}")]
    Refused(Refusal),
    #[error("the borrower stopped in the middle of a frame, or does not take its answers")]
    Stalled,
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Tls(TlsError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn serve<S: Service>(mut guard: Registered<S>, stream: Arc<TcpStream>, address: SocketAddr) {
    match converse(&mut guard, stream, address) {
        End::Malformed(error) => warn!(%address, %error, "connection closed: malformed frame"),
        End::Tls(error) => {
            if let Some(unsaid) = INSECURE.may_say(Instant::now()) {
                warn!(%address, unsaid, %error, "connection closed: it is not secure");
            }
        }
        end => debug!(%address, %end, "connection closed"),
    }
    let _ = guard.peer.stream.shutdown(Shutdown::Both);
}

fn converse<S: Service>(
    guard: &mut Registered<S>,
    stream: Arc<TcpStream>,
    address: SocketAddr,
) -> End {
    match try_converse(guard, stream, address) {
        Ok(end) | Err(end) if guard.peer.cut.load(Ordering::Acquire) => match end {
            End::Malformed(error) => End::Malformed(error),
            _ => End::Cut,
        },
        Ok(end) | Err(end) => end,
    }
}

fn try_converse<S: Service>(
    guard: &mut Registered<S>,
    stream: Arc<TcpStream>,
    address: SocketAddr,
) -> Result<End, End> {
    let limits = guard.shared.limits;
    let service = guard.shared.service.clone();
    stream.set_nonblocking(false)?;
    socket::prepare(stream.as_fd(), limits.stall)?;
    stream.set_write_timeout(Some(limits.stall))?;

    let deadline = Instant::now() + limits.handshake;
    let credentials = guard.shared.credentials.clone();
    let session = credentials.map(|credentials| Session::accept(&stream, &credentials, deadline));
    let session = session.transpose().map_err(not_secure)?;
    let (head, parts, more) = (Vec::new(), Vec::new(), More::Unknown);
    let mut wire = Wire { stream: stream.clone(), session, head, parts, more };
    let hello = receive_hello(&mut wire, deadline)?;
    let node = wire.session.as_ref().and_then(Session::peer);
    let version = VERSIONS.1.min(hello.versions.1);
    let caller = Caller { address, node, version };
    let (welcome, session) = match greet(guard, &*service, &hello, caller) {
        Ok((welcome, session)) => (Ok(Welcome { version, ..welcome }), Some(session)),
        Err(refusal) => (Err(refusal.in_version(version)), None),
    };
    wire.head.extend_from_slice(&codec::encode_welcome(&welcome));
    // SAFETY: there is no memory besides the head, which the wire owns.
    unsafe { wire.send(&[])? };
    let Some(mut session) = session else {
        return Ok(welcome.map_or_else(End::Refused, |_| End::Closed));
    };

    stream.set_read_timeout(Some(limits.stall.min(limits.idle)))?;
    let mut frames = Frames::new(limits.idle);
    let mut tables = RequestTables::default();
    loop {
        let Frame { head, frame, data, more } = frames.next(&mut wire)?;
        if let Some(session) = &mut wire.session {
            session.check().map_err(not_secure)?;
        }
        if guard.peer.cut.load(Ordering::Acquire) {
            return Ok(End::Cut);
        }
        let request = codec::decode_request(&head, frame, &mut tables)?;
        head.check_version(&request, version)?;
        let pages_asked = match request {
            Request::Read { pages, .. } => pages.len(),
            _ => 0,
        };
        wire.more = more;
        let reply = Reply { wire: &mut wire, id: head.id(), version, pages_asked };
        service.handle(&mut session, request, data, reply).outcome.map_err(stalled)?;
    }
}

fn greet<S: Service>(
    guard: &mut Registered<S>,
    service: &S,
    hello: &Hello,
    caller: Caller<'_>,
) -> Result<(Welcome, S::Session), Refusal> {
    let (oldest, newest) = hello.versions;
    if newest < VERSIONS.0 || oldest > VERSIONS.1 || oldest > newest {
        return Err(Refusal::Version(VERSIONS.0, VERSIONS.1));
    }
    guard.take_lane((hello.space, hello.lane))?;
    service.hello(hello, caller)
}

fn receive_hello(wire: &mut Wire, deadline: Instant) -> Result<Hello, End> {
    let mut bytes = [0; HELLO_BYTES];
    let mut filled = 0;
    while filled < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(End::Stalled);
        }
        wire.stream.set_read_timeout(Some(left))?;
        filled += wire.receive(&mut bytes[filled..], Wait::Yes).map_err(not_secure)?.plain;
        // A peer of another protocol may never send as much as a greeting has.
        if filled >= 4 && bytes[..4] != crate::protocol::MAGIC {
            return Err(Malformed::Magic.into());
        }
    }
    Ok(codec::decode_hello(&bytes)?)
}

/// A blocking socket reports its timeout as `WouldBlock`.
fn stalled(error: io::Error) -> End {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => End::Stalled,
        _ => End::Io(error),
    }
}

/// Maps an error of TLS to the end of its connection.
fn not_secure(error: TlsError) -> End {
    match error {
        TlsError::Closed => End::Closed,
        TlsError::Io(error) => stalled(error),
        error => End::Tls(error),
    }
}

/// A request that has come.
struct Frame<'a> {
    head: Head,
    /// The bytes of head and table.
    frame: &'a [u8],
    /// The payload.
    data: &'a [u8],
    /// Whether the answer to the next one follows at once.
    more: More,
}

/// Receives a connection's frames, whole, one after another.
struct Frames {
    idle: Duration,
    vigil: Vigil,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Frames {
    fn new(idle: Duration) -> Frames {
        // Fresh memory of this size is mapped, not touched: a connection that only reads pages
        // uses the first few of it.
        let buffer = vec![0; MAX_FRAME_BYTES].into_boxed_slice();
        Frames { idle, vigil: Vigil::default(), buffer, start: 0, end: 0 }
    }

    fn next(&mut self, wire: &mut Wire) -> Result<Frame<'_>, End> {
        self.fill(wire, HEAD_BYTES)?;
        let (head, _) =
            self.buffer[self.start..].split_first_chunk::<HEAD_BYTES>().ok_or(Malformed::Check)?;
        let head = Head::parse(head)?;
        let table_end = HEAD_BYTES + head.table_bytes();
        let length = table_end + head.payload_bytes();
        self.fill(wire, length)?;
        let frame = self.start..self.start + length;
        self.start = frame.end;
        let more = if self.begins_with_short() { More::Follows } else { More::Unknown };
        let (frame, data) = self.buffer[frame].split_at(table_end);
        Ok(Frame { head, frame, data, more })
    }

    /// Whether the next frame is there and is a read or write, which waits for no other request.
    fn begins_with_short(&self) -> bool {
        let bytes = &self.buffer[self.start..self.end];
        let head = bytes.split_first_chunk::<HEAD_BYTES>();
        let head = head.and_then(|(head, _)| Head::parse(head).ok());
        head.is_some_and(|head| {
            let length = HEAD_BYTES + head.table_bytes() + head.payload_bytes();
            head.is_read_or_write() && bytes.len() >= length
        })
    }

    /// Receives until `wanted` bytes of the next frame are there. Takes whatever else has come: of
    /// requests in a row, many are had for one call.
    fn fill(&mut self, wire: &mut Wire, wanted: usize) -> Result<(), End> {
        if self.end - self.start >= wanted {
            return Ok(());
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < wanted {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut idle_since: Option<Instant> = None;
        while self.end - self.start < wanted {
            let wait = if self.vigil.looks_again() { Wait::No } else { Wait::Yes };
            match wire.receive(&mut self.buffer[self.end..], wait) {
                Ok(received) => {
                    self.end += received.plain;
                    self.vigil.keep();
                }
                Err(TlsError::Io(_)) if wait == Wait::No => {}
                Err(error) => match not_secure(error) {
                    End::Stalled if self.start == self.end && !wire.is_amid_record() => {
                        // The socket's timeout is the stall limit, which is shorter than the idle
                        // one; the first timeout tells only that idling has begun.
                        if idle_since.get_or_insert_with(Instant::now).elapsed() >= self.idle {
                            return Err(End::Idle);
                        }
                    }
                    end => return Err(end),
                },
            }
        }
        Ok(())
    }
}
