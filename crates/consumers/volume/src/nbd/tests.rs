//! The server, with sockets and a volume on real donors, in this process.

use super::wire::{MAX_PAYLOAD, OPTION_MAGIC, REQUEST_MAGIC, option};
use crate::attach::Role;
use crate::volume::Volume;
use crate::volume::tests::{World, read};
use crate::{Front, Server, Terms};
use hecaton_memory::PAGE_SIZE;
use hecaton_pki::{Authority, CredentialsDir, Identity, Wish};
use hecaton_testkit::{patience, wait_until};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

const PAGE: u64 = PAGE_SIZE as u64;

/// Size of each volume in pages.
const PAGES: u64 = 100;

fn serve(volume: Arc<Volume>) -> (Server, SocketAddr) {
    let server = Server::new(volume);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let terms = Terms { front: Front::Nbd, role: Role::Writer, certificate: None };
    server.listen(terms, listener.into()).unwrap();
    (server, address)
}

/// A client that has chosen the export.
fn client(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    choose(&mut stream);
    stream
}

fn choose(stream: &mut (impl io::Read + io::Write)) {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream
        .write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat())
        .unwrap();
    let mut chosen = [0; 10];
    stream.read_exact(&mut chosen).unwrap();
    assert_eq!(chosen[..8], (PAGES * PAGE).to_be_bytes());
}

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    flagged_request(0, command, cookie, offset, length)
}

fn flagged_request(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

/// The error and the cookie of the next simple reply.
fn reply(stream: &mut TcpStream) -> (u32, u64) {
    let mut bytes = [0; 16];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..4], [0x67, 0x44, 0x66, 0x98]);
    let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    (error, u64::from_be_bytes(bytes[8..].try_into().unwrap()))
}

#[test]
fn a_malformed_request_ends_its_connection_and_no_other() {
    let world = World::new(1, 1, PAGES);
    let (server, address) = serve(world.volume());
    let mut good = client(address);
    let ends: [&[u8]; 4] = [&[0xff; 28], &request(1, 1, 0, u32::MAX), &[1; 5], b""];
    for end in ends {
        let mut bad = client(address);
        bad.write_all(end).unwrap();
        bad.shutdown(Shutdown::Write).unwrap();
        assert_eq!(bad.read(&mut [0; 1]).unwrap_or(0), 0, "it is closed");
    }
    // The server answers a well-formed request that it cannot execute.
    let cases =
        [(0, PAGES * PAGE, 1, 22), (1, PAGES * PAGE - 1, 2, 28), (9, 0, 1, 22), (0, 0, 0, 22)];
    for (cookie, (command, offset, length, error)) in (1..).zip(cases) {
        good.write_all(&request(command, cookie, offset, length)).unwrap();
        if command == 1 {
            good.write_all(&vec![0; length as usize]).unwrap();
        }
        assert_eq!(reply(&mut good), (error, cookie));
    }
    wait_until("only one is left", || server.clients() == 1);
    assert!(server.close_if_unused().is_err());
    drop(good);
    wait_until("none is left", || server.close_if_unused().is_ok());
    server.stop();
}

/// A client that has chosen the export over TLS, and shows a certificate of this role; what it was
/// told if it was not let in.
fn tls_client(
    address: SocketAddr,
    authority: &Authority,
    role: hecaton_pki::Role,
) -> Result<rustls::StreamOwned<rustls::ClientConnection, TcpStream>, Vec<u8>> {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let identity = Identity { name: format!("the-{role}"), role };
    let hosts = vec!["127.0.0.1".to_owned()];
    let dir = authority.issue(&Wish { identity, hosts, days: 1, renew: true }).unwrap().dir;
    let certificate = |name: &str| CertificateDer::from_pem_file(dir.join(name)).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate("ca.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![certificate("cert.pem")],
            PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap(),
        )
        .unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let of_option = |option: u32, data: &[u8]| {
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        [&head.concat(), data].concat()
    };
    // Nothing is told of it before TLS.
    stream.write_all(&[&3u32.to_be_bytes()[..], &of_option(option::LIST, b"")].concat()).unwrap();
    stream.write_all(&of_option(option::START_TLS, b"")).unwrap();
    let mut answer = |expected: u32| {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(head[12..16], expected.to_be_bytes());
        let length = u32::from_be_bytes(head[16..].try_into().unwrap());
        stream.read_exact(&mut vec![0; length as usize]).unwrap();
    };
    answer(super::wire::answer::ERR_TLS_REQUIRED);
    answer(super::wire::answer::ACK);
    let host = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), host).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, stream);
    let go = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
    if stream.write_all(&of_option(option::GO, &go)).is_err() {
        return Err(Vec::new());
    }
    // The export's size, the sizes of blocks, and that it is done; or why not.
    let mut heard = Vec::new();
    for _ in 0..3 {
        let mut head = [0; 20];
        if stream.read_exact(&mut head).is_err() {
            return Err(heard);
        }
        let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
        stream.read_exact(&mut data).unwrap();
        heard.extend_from_slice(&data);
        if head[12] & 0x80 != 0 {
            return Err(heard);
        }
    }
    Ok(stream)
}

#[test]
fn over_tls_whoever_may_is_served_and_nobody_else() {
    use hecaton_pki::Role as Certified;
    let scratch = tempfile::tempdir().unwrap();
    let authority = Authority::init(&scratch.path().join("pki")).unwrap();
    let stranger = Authority::init(&scratch.path().join("other")).unwrap();
    let identity = Identity { name: "disks".into(), role: Certified::Export };
    let hosts = vec!["127.0.0.1".to_owned()];
    let own = authority.issue(&Wish { identity, hosts, days: 1, renew: false }).unwrap().dir;
    let world = World::new(1, 1, PAGES);
    let server = Server::new(world.volume());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let certificate = Some(Arc::new(CredentialsDir::new(own)));
    let terms = Terms { front: Front::Nbd, role: Role::Writer, certificate };
    server.listen(terms, listener.into()).unwrap();

    let mut stream = tls_client(address, &authority, Certified::Client).unwrap();
    // Requests as long as several records, whose ends are nowhere near those of records.
    let data: Vec<u8> = (0..PAGES * PAGE - 7).map(|at| (at * 7 % 251) as u8).collect();
    stream.write_all(&request(1, 1, 7, data.len() as u32)).unwrap();
    stream.write_all(&data).unwrap();
    let mut answer = [0; 16];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[4..8], [0; 4]);
    // All at once, of which none is read before all are sent.
    let many: Vec<u8> =
        (0..300u64).flat_map(|cookie| request(0, cookie, cookie * 999, 5000)).collect();
    stream.write_all(&many).unwrap();
    let mut seen = vec![false; 300];
    for _ in 0..300 {
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[4..8], [0; 4]);
        let cookie = u64::from_be_bytes(answer[8..].try_into().unwrap());
        assert!(!std::mem::replace(&mut seen[cookie as usize], true));
        let mut found = vec![0; 5000];
        stream.read_exact(&mut found).unwrap();
        let at = cookie as usize * 999;
        let expected = (at..at + 5000).map(|at| if at < 7 { 0 } else { data[at - 7] });
        assert!(found.into_iter().eq(expected));
    }
    drop(stream);
    wait_until("nobody is left", || server.clients() == 0);

    let mut reader = tls_client(address, &authority, Certified::ReadOnly).unwrap();
    reader.write_all(&request(4, 1, 0, 4096)).unwrap();
    reader.read_exact(&mut answer).unwrap();
    assert_eq!(answer[4..8], [0, 0, 0, 1], "EPERM");
    drop(reader);
    let told = tls_client(address, &authority, Certified::Node).expect_err("it may not");
    let told = String::from_utf8(told).unwrap();
    assert!(told.contains("node `the-node` may not use volumes"), "{told}");
    // As servers they are no clients at all; nor are others' clients.
    for (authority, role) in [
        (&authority, Certified::Manager),
        (&authority, Certified::Export),
        (&stranger, Certified::Client),
    ] {
        assert_eq!(tls_client(address, authority, role).err(), Some(Vec::new()), "{role}");
    }
    wait_until("nobody is left", || server.clients() == 0);
    server.stop();
}

#[test]
fn many_requests_are_under_way_and_each_is_answered_once() {
    let world = World::new(2, 2, PAGES);
    let (server, address) = serve(world.volume());
    let mut stream = client(address);
    let mut writer = stream.try_clone().unwrap();
    let count = 400u64;
    let sending = thread::spawn(move || {
        for cookie in 0..count {
            writer.write_all(&request(1, cookie, cookie % 90 * PAGE + 100, 5000)).unwrap();
            writer.write_all(&[cookie as u8; 5000]).unwrap();
        }
    });
    let mut seen = vec![false; count as usize];
    for _ in 0..count {
        let (error, cookie) = reply(&mut stream);
        assert_eq!(error, 0);
        assert!(!std::mem::replace(&mut seen[cookie as usize], true), "{cookie} twice");
    }
    sending.join().unwrap();
    stream.write_all(&request(3, 1000, 0, 0)).unwrap();
    assert_eq!(reply(&mut stream), (0, 1000));
    stream.write_all(&request(2, 1001, 0, 0)).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    server.stop();
}

/// The next replies, by their cookies: the error, and so many bytes if it is none.
fn replies(stream: &mut TcpStream, bytes: &[usize]) -> Vec<(u32, Vec<u8>)> {
    let mut found = vec![None; bytes.len()];
    for _ in bytes {
        let (error, cookie) = reply(stream);
        let mut data = vec![0; if error == 0 { bytes[cookie as usize] } else { 0 }];
        stream.read_exact(&mut data).unwrap();
        assert!(found[cookie as usize].replace((error, data)).is_none(), "{cookie} twice");
    }
    found.into_iter().map(|reply| reply.expect("each is answered")).collect()
}

#[test]
fn requests_that_come_together_are_answered_each_on_its_own() {
    let world = World::new(2, 2, PAGES);
    let volume = world.volume();
    volume.write(0, &[7; 20 * PAGE_SIZE]).unwrap();
    let (server, address) = serve(Arc::clone(&volume));
    let mut stream = client(address);
    let write = |cookie, offset, data: &[u8]| {
        [request(1, cookie, offset, data.len() as u32), data.to_vec()].concat()
    };
    let together = [
        write(0, 0, &[1; PAGE_SIZE]),
        request(0, 1, PAGES * PAGE - 1, 2),
        request(0, 2, 5 * PAGE, 3 * PAGE as u32),
        write(3, 10 * PAGE + 7, &[3; 5000]),
        write(4, PAGES * PAGE, &[4; 100]),
        request(3, 5, 0, 0),
        request(9, 6, 0, 4096),
        request(0, 7, 50 * PAGE, 100),
        flagged_request(1, 1, 8, 2 * PAGE, 2 * PAGE as u32),
        vec![8; 2 * PAGE_SIZE],
        request(0, 9, 19 * PAGE + 9, 2 * PAGE as u32),
    ];
    let bytes = [0, 0, 3 * PAGE_SIZE, 0, 0, 0, 0, 100, 0, 2 * PAGE_SIZE];
    // As a whole, and in pieces that end anywhere.
    for piece in [usize::MAX, 1000, 13] {
        for piece in together.concat().chunks(piece) {
            stream.write_all(piece).unwrap();
        }
        let found = replies(&mut stream, &bytes);
        let errors: Vec<u32> = found.iter().map(|(error, _)| *error).collect();
        assert_eq!(errors, [0, 22, 0, 0, 28, 0, 22, 0, 0, 0]);
        assert!(found[2].1 == [7; 3 * PAGE_SIZE] && found[7].1 == [0; 100]);
        let (kept, hole) = found[9].1.split_at(PAGE_SIZE - 9);
        assert!(kept.iter().all(|byte| *byte == 7) && hole.iter().all(|byte| *byte == 0));
        assert!(read(&volume, 0, PAGE_SIZE) == [1; PAGE_SIZE]);
        assert!(read(&volume, 2 * PAGE, 2 * PAGE_SIZE) == [8; 2 * PAGE_SIZE]);
        assert!(read(&volume, 10 * PAGE + 7, 5000) == [3; 5000]);
        volume.write(0, &[7; 20 * PAGE_SIZE]).unwrap();
    }
    server.stop();
}

#[test]
fn more_requests_than_are_begun_at_once_wait_and_are_answered() {
    let world = World::new(2, 1, PAGES);
    let (server, address) = serve(world.volume());
    let mut stream = client(address);
    let all: Vec<u8> = (0..300u64)
        .flat_map(|cookie| {
            let head = request(1, cookie, cookie % PAGES * PAGE, PAGE as u32);
            [head, vec![(cookie % PAGES) as u8; PAGE_SIZE]].concat()
        })
        .collect();
    let mut writer = stream.try_clone().unwrap();
    let sending = thread::spawn(move || writer.write_all(&all).unwrap());
    assert!(replies(&mut stream, &[0; 300]).iter().all(|(error, _)| *error == 0));
    sending.join().unwrap();
    // No answer is taken before all are asked for, which is more than sockets have room for.
    let read = |cookie: u64| request(0, cookie, cookie % 37 * PAGE, 16 * PAGE as u32);
    stream.write_all(&(0..300u64).flat_map(read).collect::<Vec<u8>>()).unwrap();
    for (cookie, (error, data)) in replies(&mut stream, &[16 * PAGE_SIZE; 300]).iter().enumerate() {
        let pages = data.chunks_exact(PAGE_SIZE).zip(cookie % 37..);
        assert!(*error == 0 && pages.into_iter().all(|(page, at)| *page == [at as u8; PAGE_SIZE]));
    }
    server.stop();
}

#[test]
fn who_takes_no_answers_or_ends_amid_a_request_keeps_nobody_from_a_page() {
    let world = World::new(1, 1, PAGES);
    let volume = world.volume();
    volume.write(0, &[7; (PAGES * PAGE) as usize]).unwrap();
    let (server, address) = serve(volume);
    let mut deaf = client(address);
    let read = |cookie: u64| request(0, cookie, 0, 16 * PAGE as u32);
    deaf.write_all(&(0..400u64).flat_map(read).collect::<Vec<u8>>()).unwrap();
    let mut slow = client(address);
    slow.write_all(&[read(0), request(1, 1, 0, 64 * PAGE as u32), vec![1; 9]].concat()).unwrap();
    slow.read_exact(&mut vec![0; 16 + 16 * PAGE_SIZE]).unwrap();
    let mut stream = client(address);
    for page in 0..PAGES {
        stream.write_all(&request(1, page, page * PAGE, PAGE as u32)).unwrap();
        stream.write_all(&[8; PAGE_SIZE]).unwrap();
        assert_eq!(reply(&mut stream), (0, page));
    }
    drop((deaf, slow));
    wait_until("they have gone", || server.clients() == 1);
    server.stop();
}

/// A volume full of sevens at a socket that has little room for answers, and its client.
fn with_little_room() -> (World, Server, UnixStream) {
    let world = World::new(1, 1, PAGES);
    let volume = world.volume();
    volume.write(0, &[7; (PAGES * PAGE) as usize]).unwrap();
    let server = Server::new(volume);
    let path = world.scratch().join("nbd");
    let terms = Terms { front: Front::Nbd, role: Role::Writer, certificate: None };
    server.listen(terms, UnixListener::bind(&path).unwrap().into()).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    stream.set_write_timeout(Some(patience())).unwrap();
    choose(&mut stream);
    (world, server, stream)
}

/// Reads whose answers have more bytes than [`with_little_room`].
fn long_reads() -> Vec<u8> {
    (0..40u64).flat_map(|cookie| request(0, cookie, 0, 16 * PAGE as u32)).collect()
}

#[test]
fn who_goes_with_answers_untaken_is_gone_whatever_it_wanted_next() {
    let (_world, server, mut deaf) = with_little_room();
    // One that has all of a client's bytes.
    deaf.write_all(&[long_reads(), request(0, 40, 0, MAX_PAYLOAD)].concat()).unwrap();
    deaf.read_exact(&mut [0; 16]).unwrap();
    drop(deaf);
    wait_until("it has gone", || server.clients() == 0);
    server.stop();
}

#[test]
fn who_takes_no_answers_before_it_has_sent_a_long_request_is_heard_to_its_end() {
    let (_world, server, mut stream) = with_little_room();
    stream.write_all(&long_reads()).unwrap();
    let bytes = 99 * PAGE_SIZE;
    stream.write_all(&[request(1, 40, PAGE, bytes as u32), vec![8; bytes]].concat()).unwrap();
    for _ in 0..=40 {
        let mut head = [0; 16];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(head[4..8], [0; 4]);
        if head[15] < 40 {
            stream.read_exact(&mut vec![0; 16 * PAGE_SIZE]).unwrap();
        }
    }
    drop(stream);
    wait_until("it has gone", || server.clients() == 0);
    server.stop();
}

/// A client of the newer kind, which has agreed upon structured replies and the allocation.
fn modern_client(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    let context = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 15][..], b"base:allocation"].concat();
    for (number, data, answers) in [
        (option::STRUCTURED_REPLY, &b""[..], 1),
        (option::SET_META_CONTEXT, &context, 2),
        (option::GO, &[0; 6], 3),
    ] {
        stream.write_all(&option_bytes(number, data)).unwrap();
        for _ in 0..answers {
            let mut head = [0; 20];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(head[12] & 0x80, 0, "an error");
            let length = u32::from_be_bytes(head[16..].try_into().unwrap());
            stream.read_exact(&mut vec![0; length as usize]).unwrap();
        }
    }
    stream
}

fn option_bytes(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// The kind of the next reply, which has one chunk, and what it holds.
fn structured_reply(stream: &mut TcpStream) -> (u16, Vec<u8>) {
    let mut head = [0; 20];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..6], [0x66, 0x8e, 0x33, 0xef, 0, 1]);
    let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
    stream.read_exact(&mut data).unwrap();
    (u16::from_be_bytes([head[6], head[7]]), data)
}

#[test]
fn the_status_of_blocks_is_what_was_written() {
    let world = World::new(1, 1, PAGES);
    let volume = world.volume();
    volume.write(2 * PAGE, &[1; 3 * PAGE_SIZE]).unwrap();
    volume.write(9 * PAGE + 5, &[1; 1]).unwrap();
    volume.write_zeroes(20 * PAGE, PAGE, true).unwrap();
    let (server, address) = serve(volume);
    let mut stream = modern_client(address);
    let mut status = |flags: u16, offset: u64, length: u64| {
        let asked = flagged_request(flags, 7, 1, offset, length as u32);
        stream.write_all(&asked).unwrap();
        structured_reply(&mut stream)
    };
    let told = |extents: &[(u64, u32)]| {
        let mut data = vec![0, 0, 0, 1];
        for (length, state) in extents {
            data.extend_from_slice(&(*length as u32).to_be_bytes());
            data.extend_from_slice(&state.to_be_bytes());
        }
        (5, data)
    };
    let all = [
        (2 * PAGE, 3),
        (3 * PAGE, 0),
        (4 * PAGE, 3),
        (PAGE, 0),
        (10 * PAGE, 3),
        (PAGE, 0),
        (79 * PAGE, 3),
    ];
    assert_eq!(status(0, 0, PAGES * PAGE), told(&all));
    assert_eq!(status(1 << 3, 0, PAGES * PAGE), told(&all[..1]), "only one is asked for");
    assert_eq!(status(0, PAGE + 7, 2 * PAGE), told(&[(PAGE - 7, 3), (PAGE + 7, 0)]));
    // An invalid request gets an error in one chunk, and the client may go on.
    let invalid = (0x8001, vec![0, 0, 0, 22, 0, 0]);
    assert_eq!(status(0, PAGES * PAGE - 1, 2), invalid);
    assert_eq!(status(1 << 2, 0, 1), invalid);
    // A client that has not negotiated the context gets a simple reply.
    let mut old = client(address);
    old.write_all(&request(7, 5, 0, 4096)).unwrap();
    assert_eq!(reply(&mut old), (22, 5));
    drop((stream, old));
    wait_until("none is left", || server.clients() == 0);
    server.stop();
}

/// A part of what a client sends that does not keep to the protocol, or does so by chance.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    let noise = || prop::collection::vec(any::<u8>(), 0..60);
    let length = prop_oneof![0..9000u32, Just(1 << 20), any::<u32>()];
    let offset = prop_oneof![0..PAGES * PAGE + 5000, any::<u64>()];
    let options = (0..12u32, noise()).prop_map(|(number, data)| option_bytes(number, &data));
    let requests = (any::<u16>(), 0..10u16, any::<u64>(), offset, length, 0..5u8).prop_map(
        |(flags, command, cookie, offset, length, short)| {
            let flags = if short == 0 { flags } else { flags & 15 };
            let mut bytes = flagged_request(flags, command, cookie, offset, length);
            if command == 1 && length <= 1 << 20 {
                let payload = length as usize / if short == 1 { 2 } else { 1 };
                bytes.resize(bytes.len() + payload, 7);
            }
            bytes
        },
    );
    prop_oneof![
        4 => requests,
        2 => options,
        1 => noise(),
        1 => Just(option_bytes(option::STRUCTURED_REPLY, b"")),
        1 => Just(option_bytes(option::GO, &[0; 6])),
    ]
}

/// A whole stream; most of them come through the handshake, and some have one bit wrong.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::collection::vec(piece(), 0..20);
    (pieces, any::<bool>(), any::<prop::sample::Index>(), 0..16u8).prop_map(
        |(pieces, chooses, at, bit)| {
            let mut bytes = 3u32.to_be_bytes().to_vec();
            if chooses {
                bytes.extend(option_bytes(option::STRUCTURED_REPLY, b""));
                bytes.extend(option_bytes(option::GO, &[0; 6]));
            }
            bytes.extend(pieces.concat());
            if bit < 8 {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
            }
            bytes
        },
    )
}

/// Whatever a client sends, its connection ends with it, and others go on.
#[test]
fn any_stream_ends_its_connection_and_no_other() {
    let world = World::new(1, 1, PAGES);
    let volume = world.volume();
    let (server, address) = serve(Arc::clone(&volume));
    let good = std::cell::RefCell::new((client(address), 0u64));
    let mut runner = TestRunner::new(ProptestConfig { cases: 200, ..ProptestConfig::default() });
    let ran = runner.run(&stream(), |bytes| {
        let mut bad = TcpStream::connect(address).unwrap();
        bad.set_read_timeout(Some(patience())).unwrap();
        let mut heard = bad.try_clone().unwrap();
        let listening = thread::spawn(move || match io::copy(&mut heard, &mut io::sink()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("not closed"),
            _ => {}
        });
        // The server may have hung up already.
        let _ = bad.write_all(&bytes).and_then(|()| bad.shutdown(Shutdown::Write));
        listening.join().expect("it is closed");
        // Requests that the client had in flight are over.
        wait_until("only one is left", || server.clients() == 1);
        let (good, cookie) = &mut *good.borrow_mut();
        *cookie += 1;
        let data = [*cookie as u8; 5000];
        good.write_all(&request(1, *cookie, 3 * PAGE, 5000)).unwrap();
        good.write_all(&data).unwrap();
        prop_assert_eq!(reply(good), (0, *cookie));
        prop_assert!(read(&volume, 3 * PAGE, 5000) == data);
        Ok(())
    });
    ran.unwrap();
    assert_eq!(volume.stats(0).unkept_bytes, 0);
    drop(good);
    server.stop();
}
