//! Accepts the clients of a volume, whatever their protocol.

use crate::attach::{Client, Role};
use crate::volume::Volume;
use crate::{nbd, vhost_user};
use hecaton_pki::CredentialsDir;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most clients of a volume at a time.
const MAX_CLIENTS: usize = 32;

/// After a failure to accept: others' descriptors may be closed meanwhile.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Protocol and rights of a socket's clients.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Protocol of the clients.
    pub front: Front,
    /// Rights of the clients.
    pub role: Role,
    /// They speak TLS, and are shown this. For NBD only.
    pub certificate: Option<Arc<CredentialsDir>>,
}

/// Protocol of a socket's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// The network block device protocol.
    Nbd,
    /// vhost-user: each client is a machine monitor, and the volume a drive of its guest.
    VhostUser,
}

/// Serves a volume on any number of listening sockets.
pub struct Server {
    volume: Arc<Volume>,
    clients: Arc<Clients>,
    listening: Mutex<Vec<Listening>>,
}

struct Listening {
    number: Listener,
    socket: Arc<OwnedFd>,
    acceptor: JoinHandle<()>,
}

/// One of a server's listening sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener(u64);

/// A client that is connected.
struct Connected {
    by: Listener,
    socket: Arc<File>,
}

#[derive(Default)]
struct Clients {
    table: Mutex<Table>,
    left: Condvar,
}

#[derive(Default)]
struct Table {
    /// No client is taken any more.
    is_closed: bool,
    /// The sockets from which clients are taken.
    open: HashSet<u64>,
    last: u64,
    connected: HashMap<u64, Connected>,
}

/// How many clients there are, which the server was not to have any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse(pub usize);

/// Clients that keep a socket from being closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} attached to it", named(.0))]
pub struct Attached(pub Vec<Client>);

fn named(clients: &[Client]) -> String {
    let names: Vec<_> = clients.iter().map(Client::to_string).collect();
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(", "))
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(volume: Arc<Volume>) -> Server {
        Server { volume, clients: Arc::default(), listening: Mutex::default() }
    }

    /// Takes clients from a listening socket.
    pub fn listen(&self, terms: Terms, socket: OwnedFd) -> io::Result<Listener> {
        let socket = Arc::new(socket);
        let number = self.clients.open();
        let acceptor = std::thread::Builder::new().name("accept".into()).spawn({
            let (socket, volume) = (Arc::clone(&socket), Arc::clone(&self.volume));
            let clients = Arc::clone(&self.clients);
            move || accept(&terms, number, &socket, &volume, &clients)
        })?;
        self.listening().push(Listening { number, socket, acceptor });
        Ok(number)
    }

    /// Takes no further client from a socket. Refused while clients are connected there, unless it
    /// is forced: then they are cut off, and what they had asked for is finished behind them.
    pub fn unlisten(&self, number: Listener, force: bool) -> Result<(), Attached> {
        let mut listening = self.listening();
        let Some(at) = listening.iter().position(|socket| socket.number == number) else {
            return Ok(());
        };
        {
            // As long as it is held nobody is entered.
            let mut table = self.clients.table();
            let connected = table.connected.values().filter(|client| client.by == number);
            let sockets: Vec<_> = connected.map(|client| &client.socket).collect();
            if !sockets.is_empty() && !force {
                let who = |socket: &&Arc<File>| Client::of_socket(&***socket);
                return Err(Attached(sockets.iter().map(who).collect()));
            }
            for socket in sockets {
                let _ = shutdown(&**socket, Shutdown::Both);
            }
            // Wakes the acceptor with EINVAL; one that has taken a client enters it no more.
            let _ = shutdown(&*listening[at].socket, Shutdown::Both);
            table.open.remove(&number.0);
        }
        let Listening { acceptor, .. } = listening.swap_remove(at);
        // One that panicked has said so.
        let _ = acceptor.join();
        Ok(())
    }

    /// How many clients are connected.
    pub fn clients(&self) -> usize {
        self.clients.table().connected.len()
    }

    /// Takes no further client, if there is none.
    pub fn close_if_unused(&self) -> Result<(), InUse> {
        let mut table = self.clients.table();
        match table.connected.len() {
            0 => {
                table.is_closed = true;
                Ok(())
            }
            clients => Err(InUse(clients)),
        }
    }

    /// Waits until the last client has gone, and takes no further one.
    pub fn close_when_unused(&self) {
        let table = self.clients.table();
        let is_used = |table: &mut Table| !table.connected.is_empty();
        let table = self.clients.left.wait_while(table, is_used);
        table.expect("no thread panics with the clients").is_closed = true;
    }

    /// Takes no further client, and closes the connections of those that there are.
    pub fn stop(&self) {
        let mut table = self.clients.table();
        table.is_closed = true;
        for client in table.connected.values() {
            let _ = shutdown(&*client.socket, Shutdown::Both);
        }
        drop(table);
        for Listening { socket, acceptor, .. } in self.listening().drain(..) {
            // Wakes it with EINVAL; a closed descriptor would not.
            let _ = shutdown(&*socket, Shutdown::Both);
            // One that panicked has said so.
            let _ = acceptor.join();
        }
        self.close_when_unused();
    }

    fn listening(&self) -> MutexGuard<'_, Vec<Listening>> {
        self.listening.lock().expect("no thread panics with the sockets")
    }
}

impl Clients {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics with the clients")
    }

    /// A further socket from which clients are taken.
    fn open(&self) -> Listener {
        let mut table = self.table();
        table.last += 1;
        let number = table.last;
        table.open.insert(number);
        Listener(number)
    }

    /// Enters a client of a socket; none if no further one is taken.
    fn enter(&self, by: Listener, socket: &Arc<File>) -> Option<u64> {
        let mut table = self.table();
        let is_open = !table.is_closed && table.open.contains(&by.0);
        if !is_open || table.connected.len() >= MAX_CLIENTS {
            return None;
        }
        table.last += 1;
        let client = table.last;
        table.connected.insert(client, Connected { by, socket: Arc::clone(socket) });
        Some(client)
    }

    fn leave(&self, client: u64) {
        self.table().connected.remove(&client);
        self.left.notify_all();
    }
}

fn accept(
    terms: &Terms,
    number: Listener,
    listener: &OwnedFd,
    volume: &Arc<Volume>,
    clients: &Arc<Clients>,
) {
    loop {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => Arc::new(File::from(socket)),
            Err(Errno::INVAL) => return,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => {
                tracing::warn!(volume = volume.name(), %error, "a client cannot be taken");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let Some(client) = clients.enter(number, &socket) else {
            tracing::warn!(volume = volume.name(), most = MAX_CLIENTS, "a client too many");
            continue;
        };
        let serving = {
            let (volume, clients) = (Arc::clone(volume), Arc::clone(clients));
            let Terms { front, role, certificate } = terms.clone();
            move || {
                match front {
                    Front::Nbd => nbd::serve(volume, socket, role, certificate.as_deref()),
                    Front::VhostUser => match volume.attach(Client::of_socket(&*socket), role) {
                        Ok(_attached) => vhost_user::serve(volume, role, &socket),
                        Err(held) => {
                            let volume = volume.name();
                            tracing::warn!(volume, %held, "a machine's drive is refused");
                        }
                    },
                }
                clients.leave(client);
            }
        };
        let thread = std::thread::Builder::new().name("client".into()).spawn(serving);
        if let Err(error) = thread {
            tracing::warn!(volume = volume.name(), %error, "no thread for a client");
            clients.leave(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::tests::World;
    use hecaton_testkit::wait_until;
    use std::io::Read as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socket_is_closed_when_nobody_is_connected_or_by_force() {
        let world = World::new(1, 1, 1024);
        let server = Server::new(world.volume());
        let dir = tempfile::tempdir().unwrap();
        let listen = |name: &str| {
            let path = dir.path().join(name);
            let terms = Terms { front: Front::Nbd, role: Role::Writer, certificate: None };
            let socket = UnixListener::bind(&path).unwrap();
            (server.listen(terms, socket.into()).unwrap(), path)
        };
        let connect = |path| {
            let mut client = UnixStream::connect(path).unwrap();
            // A client that gets the greeting has been accepted.
            client.read_exact(&mut [0; 18]).unwrap();
            client
        };
        let [(first, at_first), (second, at_second)] = ["first", "second"].map(listen);
        let mut client = connect(&at_first);
        let other = connect(&at_second);
        let refused = server.unlisten(first, false).unwrap_err().to_string();
        let own = format!("process {} (", std::process::id());
        assert!(refused.starts_with(&own) && refused.ends_with(") is attached to it"), "{refused}");
        drop(connect(&at_first));

        server.unlisten(first, true).unwrap();
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 0, "it is cut off");
        wait_until("its end is noticed", || server.clients() == 1);
        assert!(UnixStream::connect(&at_first).is_err());
        server.unlisten(first, false).unwrap();
        drop(connect(&at_second));

        drop(other);
        wait_until("nobody is left", || server.clients() == 0);
        server.unlisten(second, false).unwrap();
        assert!(UnixStream::connect(&at_second).is_err());
        server.stop();
    }
}
