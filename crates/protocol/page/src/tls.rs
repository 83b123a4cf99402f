//! Runs TLS on a connection, at either end: records instead of bytes, all else unchanged.
//!
//! The owner of a connection waits on its socket as it does without TLS: each receive decrypts all
//! complete records. Only the beginning of a record stays undecrypted, and bytes that do not fit
//! wait for the next receive (`has_spare`). Sent bytes go into records of up to 16 KiB, which leave
//! together. So a request, or a page with its head, is one record and one send.
//!
//! A donor's pages are copied once more on their way into a record. Others may write them
//! meanwhile; the copy is one state, which does not change during its encryption.

use crate::inbox::RECEIVE_BYTES;
use crate::socket::{self, More, Wait};
pub use hecaton_pki::CredentialsDir;
use hecaton_pki::{Credentials, CredentialsError, Identity, IdentityError};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most bytes of a record's contents.
const RECORD_BYTES: usize = 16 << 10;

/// By how much more a record is than its contents, and what the protocol sends of itself.
const RECORD_EXTRA: usize = 1 << 10;

/// Received and not yet decrypted: one receive, and the record that it completes.
const INCOMING_BYTES: usize = RECEIVE_BYTES + RECORD_BYTES + RECORD_EXTRA;

/// Encrypted and not yet sent. Larger sends would be no cheaper, and the peer would wait longer for
/// its first bytes.
const OUTGOING_BYTES: usize = (64 << 10) + RECORD_EXTRA;

/// After this long the peer's certificate is looked at again: it may have been revoked, or be over.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Where a donor is, and whose it has to be.
#[derive(Clone, Debug)]
pub struct Destination {
    /// Its address.
    pub address: SocketAddr,
    /// How the connection is protected; not at all, if nothing is said.
    pub tls: Option<Tls>,
}

/// How a connection to a donor is protected.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Own certificate, and the trusted authorities.
    pub credentials: Arc<CredentialsDir>,
    /// The only node whose donor it may be. Without one, any node's that an authority vouches for.
    pub node: Option<String>,
}

impl From<SocketAddr> for Destination {
    /// Unprotected.
    fn from(address: SocketAddr) -> Destination {
        Destination { address, tls: None }
    }
}

/// Why a connection is not secure, and so is none.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// There is nothing to show.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The two ends do not come to terms, or one does not take the other's certificate.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The peer's certificate tells nobody's identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The peer is another node.
    #[error("node `{found}` answers, and it is to be node `{wanted}`")]
    OtherNode {
        /// The node that its certificate names.
        found: String,
        /// The node that it should be.
        wanted: String,
    },
    /// The peer has ended the connection.
    #[error("the connection is closed")]
    Closed,
    /// The received bytes are no record of any possible length.
    #[error("a record does not end")]
    Endless,
    /// The socket said so.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Byte counts of one receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Received {
    /// From the socket.
    pub(crate) raw: usize,
    /// To the receiver, decrypted.
    pub(crate) plain: usize,
}

/// The next step of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handshake {
    /// The socket has to take more.
    Writing,
    /// The peer has to say something.
    Reading,
    /// Nothing.
    Done,
}

enum Side {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Where a side has got to.
enum Step {
    /// There is more to be done.
    Again,
    /// The peer has to say something.
    Blocked,
    /// Records may be made, and the one that was wanted is.
    Open,
}

/// Encrypted bytes for the socket.
struct Outgoing {
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    fn has_room(&self) -> bool {
        self.buffer.len() - self.to >= RECORD_BYTES + RECORD_EXTRA
    }
}

/// Decrypted bytes for the receiver.
struct Plain<'a> {
    into: &'a mut [u8],
    filled: usize,
    /// Bytes that did not fit.
    spare: &'a mut Vec<u8>,
}

impl Plain<'_> {
    fn take(&mut self, bytes: &[u8]) {
        let room = &mut self.into[self.filled..];
        let (now, later) = bytes.split_at(bytes.len().min(room.len()));
        room[..now.len()].copy_from_slice(now);
        self.filled += now.len();
        self.spare.extend_from_slice(later);
    }
}

/// The TLS of one connection.
pub(crate) struct Session {
    side: Side,
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    outgoing: Outgoing,
    /// Contents of the next record.
    contents: Box<[u8]>,
    /// Decrypted bytes that did not fit: the next receive brings them.
    spare: Vec<u8>,
    credentials: Arc<Credentials>,
    /// The only node that the peer may be.
    node: Option<String>,
    /// The node that the peer is.
    peer: Option<String>,
    /// Certificates that the peer has shown.
    chain: Vec<CertificateDer<'static>>,
    checked_at: Instant,
}

impl Session {
    /// The side that connects to a donor. Nothing is sent yet.
    pub(crate) fn client(tls: &Tls) -> Result<Session, TlsError> {
        let credentials = tls.credentials.open()?;
        let config = Arc::clone(&credentials.now().borrower);
        // `node` says who must answer; certificates of nodes contain no addresses.
        let name = ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let side = Side::Client(UnbufferedClientConnection::new(config, name)?);
        Ok(Session::new(side, credentials, tls.node.clone()))
    }

    /// The donor's side: shakes hands with a peer, until the deadline at most.
    pub(crate) fn accept(
        stream: &TcpStream,
        credentials: &CredentialsDir,
        deadline: Instant,
    ) -> Result<Session, TlsError> {
        let credentials = credentials.open()?;
        let config = Arc::clone(&credentials.now().lender);
        let side = Side::Server(UnbufferedServerConnection::new(config)?);
        let mut session = Session::new(side, credentials, None);
        while session.shake_hands(stream.as_fd(), Wait::Yes)? != Handshake::Done {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            stream.set_read_timeout(Some(left))?;
            session.fetch(stream.as_fd(), Wait::Yes)?;
        }
        Ok(session)
    }

    fn new(side: Side, credentials: Arc<Credentials>, node: Option<String>) -> Session {
        // Fresh memory of these sizes is mapped, not touched.
        let zeros = |bytes| vec![0; bytes].into_boxed_slice();
        Session {
            side,
            incoming: zeros(INCOMING_BYTES),
            start: 0,
            end: 0,
            outgoing: Outgoing { buffer: zeros(OUTGOING_BYTES), from: 0, to: 0 },
            contents: zeros(RECORD_BYTES),
            spare: Vec::new(),
            credentials,
            node,
            peer: None,
            chain: Vec::new(),
            checked_at: Instant::now(),
        }
    }

    /// Goes on with the handshake as far as what was received allows.
    pub(crate) fn shake_hands(
        &mut self,
        socket: BorrowedFd<'_>,
        wait: Wait,
    ) -> Result<Handshake, TlsError> {
        let step = self.advance(None, &mut []);
        if step.is_err() {
            // The peer is to hear why. One that does not take it is not waited for.
            let _ = self.flush(socket, Wait::No);
        }
        let step = step?;
        if !self.flush(socket, wait)? {
            return Ok(Handshake::Writing);
        }
        match step {
            Step::Open if !self.is_handshaking() => {
                self.know_peer()?;
                Ok(Handshake::Done)
            }
            _ => Ok(Handshake::Reading),
        }
    }

    fn is_handshaking(&self) -> bool {
        match &self.side {
            Side::Client(side) => side.is_handshaking(),
            Side::Server(side) => side.is_handshaking(),
        }
    }

    /// Looks who the peer is. That an authority vouches for it was seen as hands were shaken.
    fn know_peer(&mut self) -> Result<(), TlsError> {
        let chain = match &self.side {
            Side::Client(side) => side.peer_certificates(),
            Side::Server(side) => side.peer_certificates(),
        };
        let chain = chain.unwrap_or_default();
        let own = chain.first().ok_or(rustls::Error::NoCertificatesPresented)?;
        let found = Identity::of(own)?.name;
        if let Some(wanted) = self.node.clone().filter(|wanted| *wanted != found) {
            return Err(TlsError::OtherNode { found, wanted });
        }
        self.chain = chain.iter().map(|one| one.clone().into_owned()).collect();
        self.peer = Some(found);
        self.checked_at = Instant::now();
        Ok(())
    }

    /// Which node the peer is, once hands are shaken.
    pub(crate) fn peer(&self) -> Option<&str> {
        self.peer.as_deref()
    }

    /// Whether the peer's certificate is still good: looked at now and then.
    pub(crate) fn check(&mut self) -> Result<(), TlsError> {
        if self.checked_at.elapsed() >= CHECK_INTERVAL {
            self.checked_at = Instant::now();
            self.credentials.now().verify_client(&self.chain)?;
        }
        Ok(())
    }

    /// Makes one record of the first bytes of `parts`, as many as there is room for; says how many.
    ///
    /// # Safety
    /// Every `iovec` must point to memory that stays mapped during the call. It may change
    /// meanwhile, but only by atomics or the kernel.
    pub(crate) unsafe fn seal(&mut self, parts: &[libc::iovec]) -> Result<usize, TlsError> {
        if !self.outgoing.has_room() {
            return Ok(0);
        }
        let mut contents = std::mem::take(&mut self.contents);
        let mut filled = 0;
        for part in parts {
            let bytes = part.iov_len.min(contents.len() - filled);
            // SAFETY: the caller vouches for the part, which has as many bytes.
            unsafe { copy_shared(part.iov_base.cast(), &mut contents[filled..filled + bytes]) };
            filled += bytes;
        }
        let step = self.advance(Some(&contents[..filled]), &mut []);
        self.contents = contents;
        match step? {
            Step::Open => Ok(filled),
            Step::Again | Step::Blocked => Err(rustls::Error::HandshakeNotComplete.into()),
        }
    }

    /// Sends what is encrypted. False if the socket does not take all of it now.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> io::Result<bool> {
        let outgoing = &mut self.outgoing;
        while !outgoing.is_empty() {
            let parts = [socket::iovec(&outgoing.buffer[outgoing.from..outgoing.to])];
            // SAFETY: the buffer is ours, and nobody writes to it meanwhile.
            match unsafe { socket::send(socket, &parts, wait, More::Unknown) } {
                Ok(sent) => outgoing.from += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && wait == Wait::No => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        (outgoing.from, outgoing.to) = (0, 0);
        Ok(true)
    }

    /// Takes spare bytes, or receives once and decrypts into `into`. `WouldBlock` if nothing came.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        into: &mut [u8],
        wait: Wait,
    ) -> Result<Received, TlsError> {
        if !self.spare.is_empty() {
            let plain = self.spare.len().min(into.len());
            into[..plain].copy_from_slice(&self.spare[..plain]);
            self.spare.drain(..plain);
            return Ok(Received { raw: 0, plain });
        }
        let raw = self.fetch(socket, wait)?;
        let mut plain = 0;
        self.advance_into(None, into, &mut plain)?;
        Ok(Received { raw, plain })
    }

    /// Whether the next receive brings something for which the socket need not be readable.
    pub(crate) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Whether a part of a record has come, and not its end.
    pub(crate) fn is_amid_record(&self) -> bool {
        self.start < self.end
    }

    /// One receive, not decrypted.
    pub(crate) fn fetch(&mut self, socket: BorrowedFd<'_>, wait: Wait) -> Result<usize, TlsError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.incoming.len() - self.end < RECEIVE_BYTES {
            self.incoming.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let until = self.incoming.len().min(self.end + RECEIVE_BYTES);
        if self.end == until {
            return Err(TlsError::Endless);
        }
        match socket::receive(socket, &mut self.incoming[self.end..until], wait)? {
            0 => Err(TlsError::Closed),
            count => {
                self.end += count;
                Ok(count)
            }
        }
    }

    fn advance(&mut self, record: Option<&[u8]>, into: &mut [u8]) -> Result<Step, TlsError> {
        self.advance_into(record, into, &mut 0)
    }

    /// Goes on until nothing more can be done with the received bytes; then makes a record, if one
    /// is wanted.
    fn advance_into(
        &mut self,
        record: Option<&[u8]>,
        into: &mut [u8],
        filled: &mut usize,
    ) -> Result<Step, TlsError> {
        let mut plain = Plain { into, filled: 0, spare: &mut self.spare };
        let outgoing = &mut self.outgoing;
        // After an error one step more is taken: it encodes what the peer is to hear of it.
        let mut failed = None;
        loop {
            let incoming = &mut self.incoming[self.start..self.end];
            let (discard, step) = match &mut self.side {
                Side::Client(side) => {
                    take_step(side.process_tls_records(incoming), record, outgoing, &mut plain)
                }
                Side::Server(side) => {
                    take_step(side.process_tls_records(incoming), record, outgoing, &mut plain)
                }
            };
            self.start += discard;
            *filled = plain.filled;
            match (failed, step) {
                (Some(error), _) => return Err(TlsError::Tls(error)),
                (None, Err(TlsError::Tls(error))) => failed = Some(error),
                (None, Ok(Step::Again)) => failed = None,
                (None, step) => return step,
            }
        }
    }
}

/// Does what the state of a connection asks for. Returns how many received bytes are done with.
fn take_step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    record: Option<&[u8]>,
    outgoing: &mut Outgoing,
    plain: &mut Plain<'_>,
) -> (usize, Result<Step, TlsError>) {
    let UnbufferedStatus { mut discard, state } = status;
    let room = &mut outgoing.buffer[outgoing.to..];
    let step = match state {
        Err(error) => Err(error.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    plain.take(record.payload);
                    discard += record.discard;
                }
                Some(Err(error)) => break Err(error.into()),
                None => break Ok(Step::Again),
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => match data.encode(room) {
            Ok(encoded) => {
                outgoing.to += encoded;
                Ok(Step::Again)
            }
            Err(error) => Err(io::Error::other(error).into()),
        },
        // It is in the buffer, and goes to the socket with what follows.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match record {
            None => Ok(Step::Open),
            Some(contents) => match traffic.encrypt(contents, room) {
                Ok(encrypted) => {
                    outgoing.to += encrypted;
                    Ok(Step::Open)
                }
                Err(error) => Err(io::Error::other(error).into()),
            },
        },
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Blocked),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Err(TlsError::Closed),
        // Early data are never offered.
        Ok(_) => Err(rustls::Error::General("an unknown state".to_owned()).into()),
    };
    (discard, step)
}

/// Copies memory that others may write meanwhile.
///
/// # Safety
/// As many bytes as `to` has must be mapped from `from` on. Others may write them only by atomics
/// or the kernel.
unsafe fn copy_shared(from: *const u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(from.align_offset(align_of::<AtomicU64>()).min(to.len()));
    let (words, last) = rest.as_chunks_mut::<{ size_of::<u64>() }>();
    let (first_bytes, word_bytes) = (first.len(), words.len() * size_of::<u64>());
    // SAFETY: the caller vouches for the memory, of which these are the three parts; the words are
    // aligned, and nothing is stored.
    unsafe {
        copy_bytes(from, first);
        for (at, word) in words.iter_mut().enumerate() {
            let shared =
                AtomicU64::from_ptr(from.add(first_bytes).cast_mut().cast::<u64>().add(at));
            *word = shared.load(Ordering::Relaxed).to_ne_bytes();
        }
        copy_bytes(from.add(first_bytes + word_bytes), last);
    }
}

/// The same for a few bytes, one by one.
///
/// # Safety
/// As for [`copy_shared`].
unsafe fn copy_bytes(from: *const u8, to: &mut [u8]) {
    for (at, byte) in to.iter_mut().enumerate() {
        // SAFETY: the caller vouches for it, and nothing is stored.
        *byte = unsafe { AtomicU8::from_ptr(from.add(at).cast_mut()) }.load(Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_pki::Role;
    use hecaton_pki::testing::TestAuthority;
    use std::io::Write as _;
    use std::net::TcpListener;
    use std::thread;

    /// Results of the handshake at the borrower and at the donor.
    type Ends = (Result<(Session, TcpStream), TlsError>, Result<(Session, TcpStream), TlsError>);

    fn in_a_while() -> Instant {
        Instant::now() + hecaton_testkit::patience()
    }

    /// Shakes hands as a borrower does, but waits, and receives until the other end sends a byte.
    fn introduce(
        mut session: Session,
        stream: TcpStream,
    ) -> Result<(Session, TcpStream), TlsError> {
        stream.set_read_timeout(Some(hecaton_testkit::patience()))?;
        while session.shake_hands(stream.as_fd(), Wait::Yes)? != Handshake::Done {
            session.fetch(stream.as_fd(), Wait::Yes)?;
        }
        // Whether it is taken, it hears with the first answer.
        let mut first = [0];
        while session.receive(stream.as_fd(), &mut first, Wait::Yes)?.plain == 0 {}
        Ok((session, stream))
    }

    fn meet(
        borrower: Arc<CredentialsDir>,
        node: Option<&str>,
        lender: Arc<CredentialsDir>,
    ) -> Ends {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let lending = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut session = Session::accept(&stream, &lender, in_a_while())?;
            say(&mut session, &stream, b".");
            Ok((session, stream))
        });
        let tls = Tls { credentials: borrower, node: node.map(str::to_owned) };
        let session = Session::client(&tls).unwrap();
        let met = introduce(session, TcpStream::connect(address).unwrap());
        (met, lending.join().unwrap())
    }

    fn say(session: &mut Session, stream: &TcpStream, text: &[u8]) {
        let mut rest = text;
        while !rest.is_empty() {
            // SAFETY: the text is borrowed for the whole call.
            let sealed = unsafe { session.seal(&[socket::iovec(rest)]) }.unwrap();
            rest = &rest[sealed..];
            if sealed == 0 {
                assert!(session.flush(stream.as_fd(), Wait::Yes).unwrap());
            }
        }
        assert!(session.flush(stream.as_fd(), Wait::Yes).unwrap());
    }

    /// Takes as many bytes, in pieces of that size.
    fn hear(session: &mut Session, stream: &TcpStream, bytes: usize, piece: usize) -> Vec<u8> {
        let (mut heard, mut buffer) = (Vec::new(), vec![0; piece]);
        while heard.len() < bytes {
            let received = session.receive(stream.as_fd(), &mut buffer, Wait::Yes).unwrap();
            heard.extend_from_slice(&buffer[..received.plain]);
        }
        heard
    }

    #[test]
    fn what_is_said_is_heard_in_whatever_pieces() {
        let pki = TestAuthority::in_scratch();
        let (a, b) = (pki.credentials("a", Role::Node), pki.credentials("b", Role::Node));
        let (borrower, lender) = meet(a, Some("b"), b);
        let ((mut borrower, to_lender), (mut lender, to_borrower)) =
            (borrower.unwrap(), lender.unwrap());
        let text: Vec<u8> = (0..700_000u32).map(|at| (at % 251) as u8).collect();
        for (bytes, piece) in [(1, 1), (4140, 100), (700_000, 333), (700_000, 1 << 20)] {
            let said = text[..bytes].to_vec();
            thread::scope(|scope| {
                scope.spawn(|| say(&mut borrower, &to_lender, &said));
                assert!(hear(&mut lender, &to_borrower, bytes, piece) == said);
            });
            thread::scope(|scope| {
                scope.spawn(|| say(&mut lender, &to_borrower, &said));
                assert!(hear(&mut borrower, &to_lender, bytes, piece) == said);
            });
        }
        // A page with its head is one record, and leaves at once.
        let parts = [socket::iovec(&text[..32]), socket::iovec(&text[..4096])];
        // SAFETY: the text is borrowed for the whole call.
        assert_eq!(unsafe { lender.seal(&parts) }.unwrap(), 32 + 4096);
        let (from, to) = (lender.outgoing.from, lender.outgoing.to);
        assert!(to - from < 32 + 4096 + 64, "{}", to - from);
    }

    #[test]
    fn nodes_are_taken_and_nobody_else() {
        let (pki, other) = (TestAuthority::in_scratch(), TestAuthority::in_scratch());
        let (a, b) = (pki.credentials("a", Role::Node), pki.credentials("b", Role::Node));
        for (borrower, lender, whole) in [
            (pki.credentials("root", Role::Admin), b.clone(), false),
            (pki.credentials("m", Role::Manager), b.clone(), false),
            (other.credentials("a", Role::Node), b.clone(), false),
            (a.clone(), pki.credentials("root2", Role::Admin), false),
            (a.clone(), pki.credentials("m2", Role::Manager), false),
            (a.clone(), pki.credentials("e", Role::Client), false),
            (a.clone(), other.credentials("b", Role::Node), false),
            (a.clone(), b.clone(), true),
        ] {
            let (borrowed, lent) = meet(borrower, None, lender);
            assert_eq!((borrowed.is_ok(), lent.is_ok()), (whole, whole));
            for end in [borrowed, lent] {
                let error = end.err();
                assert!(whole || matches!(error, Some(TlsError::Tls(_))), "{error:?}");
            }
        }
        let (borrowed, _) = meet(a, Some("c"), b);
        let error = borrowed.err().unwrap();
        assert_eq!(error.to_string(), "node `b` answers, and it is to be node `c`");
    }

    #[test]
    fn who_is_revoked_is_noticed_on_connections_that_are_open() {
        let pki = TestAuthority::in_scratch();
        let (a, b) = (pki.credentials("a", Role::Node), pki.credentials("b", Role::Node));
        let (borrower, lender) = meet(a, Some("b"), b);
        let ((mut borrower, _), (mut lender, _)) = (borrower.unwrap(), lender.unwrap());
        pki.authority.revoke("a").unwrap();
        for session in [&mut borrower, &mut lender] {
            session.check().expect("it is not looked at each time");
            session.checked_at -= CHECK_INTERVAL;
        }
        let revoked = rustls::CertificateError::Revoked;
        let error = lender.check().unwrap_err();
        assert!(
            matches!(&error, TlsError::Tls(rustls::Error::InvalidCertificate(why)) if *why == revoked),
            "{error:?}"
        );
        borrower.check().expect("the lender is not revoked");
    }

    #[test]
    fn who_does_not_speak_tls_hears_that_and_nobody_waits_for_who_says_nothing() {
        let pki = TestAuthority::in_scratch();
        let b = pki.credentials("b", Role::Node);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut plain = TcpStream::connect(address).unwrap();
        plain.write_all(&[b'H'; 200]).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let error = Session::accept(&stream, &b, in_a_while()).err().unwrap();
        assert!(matches!(error, TlsError::Tls(rustls::Error::InvalidMessage(_))), "{error:?}");
        let mut alert = [0; 7];
        assert_eq!(socket::receive(&plain, &mut alert, Wait::Yes).unwrap(), 7);
        assert_eq!(alert[0], 0x15, "an alert");

        let _silent = TcpStream::connect(address).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        let error = Session::accept(&stream, &b, soon).err().unwrap();
        assert!(matches!(error, TlsError::Io(_)), "{error:?}");
    }

    #[test]
    fn memory_is_copied_wherever_it_begins_and_ends() {
        let source: Vec<u8> = (0..100).collect();
        for from in 0..17 {
            for bytes in 0..50 {
                let mut copy = vec![0xff; bytes];
                // SAFETY: the source has as many bytes from there on, and nobody writes to it.
                unsafe { copy_shared(source[from..].as_ptr(), &mut copy) };
                assert_eq!(copy, source[from..from + bytes]);
            }
        }
    }
}
