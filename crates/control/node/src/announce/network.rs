//! The sockets: one to tell, one to hear. UDP over IPv4, to a multicast group or a broadcast
//! address, no farther than the network that this host is on.

use super::announcement::{Announcement, Key, MAX_BYTES, Refusal, TooLong};
use super::heard::Ignored;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, socket_with,
    sockopt::{set_socket_broadcast, set_socket_reuseaddr},
};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::Duration;

/// How long is listened before it is asked whether to go on, and who has fallen silent.
const HEARING: Duration = Duration::from_millis(500);

/// A network whose nodes tell each other of their donors.
#[derive(Debug)]
pub struct Network {
    group: SocketAddrV4,
    here: Ipv4Addr,
    key: Option<Key>,
    telling: UdpSocket,
    hearing: UdpSocket,
}

/// Why there are no announcements.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The address of this host is not one of its own, or all of them.
    #[error("cannot announce from {here}: give --announce-from an address of this host's")]
    Here {
        /// The address.
        here: Ipv4Addr,
        /// Error of the system call.
        source: io::Error,
    },
    /// The group cannot be joined.
    #[error("cannot listen to announcements at {group} through {here}")]
    Group {
        /// The group, or broadcast address.
        group: SocketAddrV4,
        /// The address of this host on that network.
        here: Ipv4Addr,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Why one was not told, or not heard.
#[derive(Debug, thiserror::Error)]
pub enum AnnounceError {
    /// There are too many donors for one datagram.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// It is not believed.
    #[error("{from} sent what is not believed: {refusal}")]
    Refused {
        /// Address of the sender.
        from: SocketAddr,
        /// Why.
        refusal: Refusal,
    },
    /// It is believed, and counts for nothing.
    #[error(transparent)]
    Ignored(#[from] Ignored),
    /// The kernel does not send.
    #[error("cannot announce to {group}: {source}")]
    Send {
        /// The group, or broadcast address.
        group: SocketAddrV4,
        /// Why.
        source: io::Error,
    },
    /// The kernel does not receive.
    #[error(transparent)]
    Receive(io::Error),
}

impl Network {
    /// The network that this host is on with the address `here`.
    pub fn join(
        group: SocketAddrV4,
        here: Ipv4Addr,
        key: Option<Key>,
    ) -> Result<Network, NetworkError> {
        let telling = telling(group, here).map_err(|source| NetworkError::Here { here, source })?;
        let hearing = hearing(group, here);
        let hearing = hearing.map_err(|source| NetworkError::Group { group, here, source })?;
        Ok(Network { group, here, key, telling, hearing })
    }

    /// The address at which others find what listens at this one.
    pub(crate) fn reachable(&self, address: SocketAddr) -> SocketAddr {
        match address.ip().is_unspecified() {
            true => (IpAddr::V4(self.here), address.port()).into(),
            false => address,
        }
    }

    pub(crate) fn tell(&self, announcement: &Announcement) -> Result<(), AnnounceError> {
        let bytes = announcement.seal(self.key.as_ref())?;
        let sent = self.telling.send_to(&bytes, self.group);
        sent.map_err(|source| AnnounceError::Send { group: self.group, source })?;
        Ok(())
    }

    /// Waits for one; none if nothing came for some time.
    pub(crate) fn hear(&self) -> Result<Option<Announcement>, AnnounceError> {
        // One byte more than fits shows that it was cut off, and then it does not match its tag.
        let mut bytes = [0; MAX_BYTES + 1];
        match self.hearing.recv_from(&mut bytes) {
            Ok((length, from)) => {
                let opened = Announcement::open(&bytes[..length], self.key.as_ref());
                opened.map(Some).map_err(|refusal| AnnounceError::Refused { from, refusal })
            }
            Err(error) if is_nothing(&error) => Ok(None),
            Err(error) => Err(AnnounceError::Receive(error)),
        }
    }
}

fn is_nothing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

fn telling(group: SocketAddrV4, here: Ipv4Addr) -> io::Result<UdpSocket> {
    // Bound to the address, it says so to those who hear, and a broadcast leaves through its
    // network.
    let socket = UdpSocket::bind((here, 0))?;
    if group.ip().is_multicast() {
        rustix::net::sockopt::set_ip_multicast_if(&socket, &here)?;
        socket.set_multicast_ttl_v4(1)?;
        // Other nodes of this host hear it as well.
        socket.set_multicast_loop_v4(true)?;
    } else {
        set_socket_broadcast(&socket, true)?;
    }
    Ok(socket)
}

fn hearing(group: SocketAddrV4, here: Ipv4Addr) -> io::Result<UdpSocket> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Several nodes of one host, as in tests: each of them hears what comes to a group.
    set_socket_reuseaddr(&socket, true)?;
    // Bound to the group itself, it hears nothing else that comes to this port.
    bind(&socket, &group)?;
    let socket = UdpSocket::from(socket);
    if group.ip().is_multicast() {
        socket.join_multicast_v4(group.ip(), &here)?;
    }
    socket.set_read_timeout(Some(HEARING))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::super::announcement::Announced;
    use super::*;
    use hecaton_testkit::wait_until_seen;

    const GROUP: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(239, 255, 72, 70), 0);

    /// A port that nobody else uses, for a group of the test's own.
    fn group() -> SocketAddrV4 {
        SocketAddrV4::new(*GROUP.ip(), hecaton_testkit::unused_port())
    }

    fn announcement() -> Announcement {
        let donor = Announced { name: "a-1".into(), address: ([127, 0, 0, 1], 7071).into() };
        Announcement { node: "a".into(), boot: 1, number: 0, location: None, donors: vec![donor] }
    }

    fn hear_one(network: &Network) -> Result<Announcement, AnnounceError> {
        wait_until_seen("an announcement or an error is heard", || {
            network.hear().transpose().ok_or("neither")
        })
    }

    #[test]
    fn all_who_listen_on_a_host_hear_what_one_tells() {
        let group = group();
        let join = || Network::join(group, Ipv4Addr::LOCALHOST, None).unwrap();
        let (first, second) = (join(), join());
        first.tell(&announcement()).unwrap();
        assert_eq!(hear_one(&first).unwrap(), announcement());
        assert_eq!(hear_one(&second).unwrap(), announcement());
    }

    #[test]
    fn a_broadcast_is_heard_too() {
        let group = SocketAddrV4::new(Ipv4Addr::new(127, 255, 255, 255), group().port());
        let network = Network::join(group, Ipv4Addr::LOCALHOST, None).unwrap();
        network.tell(&announcement()).unwrap();
        assert_eq!(hear_one(&network).unwrap(), announcement());
    }

    #[test]
    fn who_has_no_key_is_not_believed() {
        let group = group();
        let key = || Some(Key::new(b"0123456789abcdef"));
        let with_key = Network::join(group, Ipv4Addr::LOCALHOST, key()).unwrap();
        let without = Network::join(group, Ipv4Addr::LOCALHOST, None).unwrap();
        without.tell(&announcement()).unwrap();
        let refused = hear_one(&with_key).unwrap_err().to_string();
        assert!(refused.contains("--announce-key"), "{refused}");
    }

    #[test]
    fn an_address_of_others_is_refused() {
        let other = Ipv4Addr::new(192, 0, 2, 1);
        let error = Network::join(group(), other, None).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1") && error.contains("--announce-from"), "{error}");
    }
}
