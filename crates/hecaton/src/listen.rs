//! Which addresses may be listened on.
//!
//! The page protocol does not authenticate, nor does the HTTP API without certificates. On loopback
//! the users of this host can reach them, beyond it everybody can: that takes a word from the
//! administrator.

use crate::terminal::failure::usage;
use std::net::SocketAddr;

/// Refuses an address that other hosts can reach, unless that is wanted.
pub(crate) fn check(option: &str, address: SocketAddr, insecure: bool) -> anyhow::Result<()> {
    if !insecure && !address.ip().is_loopback() {
        usage!(
            "{option} {address} can be reached from other hosts, without encryption or \
             authentication; use a loopback address such as 127.0.0.1:{}, or add --insecure if \
             the network is trusted",
            address.port()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_taken_without_a_word() {
        for (address, insecure, taken) in [
            ("127.0.0.1:1", false, true),
            ("127.9.9.9:0", false, true),
            ("[::1]:1", false, true),
            ("0.0.0.0:1", false, false),
            ("10.0.0.1:1", false, false),
            ("[::]:1", false, false),
            ("0.0.0.0:1", true, true),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(check("--listen", address, insecure).is_ok(), taken, "{address}");
        }
    }
}
