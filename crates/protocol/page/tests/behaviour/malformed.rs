//! A malformed frame closes its connection with one logged line, and does nothing else. Alone in
//! its file, because the log is the whole process's.

use hecaton_memory::{Epoch, SpaceId};
use hecaton_transport::client::{Connection, Options};
use hecaton_transport::codec::encode_hello;
use hecaton_transport::protocol::{Hello, Load, Refusal, Request, VERSIONS, Welcome};
use hecaton_transport::server::{Caller, Limits, Replied, Reply, Server, Service};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

struct Obliging;

impl Service for Obliging {
    type Session = ();

    fn hello(&self, _hello: &Hello, _caller: Caller<'_>) -> Result<(Welcome, ()), Refusal> {
        Ok((Welcome { version: 0, boot: 1, donor: "d".into(), load: Load::default() }, ()))
    }

    fn handle(&self, _: &mut (), _: Request<'_>, _: &[u8], reply: Reply<'_>) -> Replied {
        reply.done(Load::default())
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn one_line_and_nothing_else() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || writer.clone())
        .init();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = Server::start(listener, Arc::new(Obliging), Limits::default(), None).unwrap();
    let hello = Hello {
        versions: VERSIONS,
        space: SpaceId(1),
        epoch: Epoch(1),
        lane: 1,
        lease: Duration::from_secs(1),
        consumer: String::new(),
    };
    let mut healthy = Connection::open(server.address(), &hello, &Options::default()).unwrap();
    let mut raw = TcpStream::connect(server.address()).unwrap();
    raw.write_all(&encode_hello(&Hello { lane: 2, ..hello })).unwrap();
    raw.write_all(&[0xab; 4096]).unwrap();
    // Returns when the donor has closed the connection, in order or with a reset.
    let _ = raw.read_to_end(&mut Vec::new());
    healthy.call(Request::Renew, &[]).unwrap();
    drop(healthy);
    server.stop();
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("malformed"), "{text}");
}
