//! In a hypervisor that somebody else than Hecaton starts (libvirt): asks the node for a pager.
//!
//! The environment holds the request: the line of JSON that the node reads. The answer names the
//! pager's socket. The connection stays open for as long as the hypervisor lives. Its end tells the
//! node that nothing more will be started on that pager.

use crate::sys;
use hecaton_uffd::sys::syscall;
use std::os::fd::RawFd;

/// Longest request, and longest answer.
const MAX_LINE: usize = 2048;

/// How long the node may take: it waits until the pager listens.
const PATIENCE_SECONDS: i64 = 30;

/// The node's socket and the request; empty if there is none. Written before the first thread.
static mut NODE_PATH: [u8; 108] = [0; 108];
static mut REQUEST: [u8; MAX_LINE] = [0; MAX_LINE];
static mut REQUEST_LEN: usize = 0;

/// Keeps what is to be asked, where. False if it cannot be that.
pub(crate) fn prepare(node: &[u8], request: &[u8]) -> bool {
    if node.is_empty() || node.len() >= 108 || request.is_empty() || request.len() >= MAX_LINE {
        return false;
    }
    // SAFETY: the constructor calls this, before the program has a second thread.
    unsafe {
        (&raw mut NODE_PATH).cast::<u8>().copy_from(node.as_ptr(), node.len());
        (&raw mut REQUEST).cast::<u8>().copy_from(request.as_ptr(), request.len());
        (&raw mut REQUEST).cast::<u8>().add(request.len()).write(b'\n');
        REQUEST_LEN = request.len() + 1;
    }
    true
}

/// Asks the node. The pager's socket is written to `path`, with a zero behind it; or the reason
/// why there is none is given to `refused`. Does nothing if nothing was prepared.
pub(crate) fn ask<T>(
    path: &mut [u8; 108],
    refused: impl FnOnce(&[u8]) -> Result<(), T>,
) -> Result<(), T> {
    // SAFETY: not written any more once there are threads.
    let (node, request, length) = unsafe {
        let node = (&raw const NODE_PATH).cast::<[u8; 108]>().read();
        (node, (&raw const REQUEST).cast::<u8>(), REQUEST_LEN)
    };
    if length == 0 {
        return Ok(());
    }
    let end = node.iter().position(|&byte| byte == 0).unwrap_or(node.len());
    let Ok(socket) = sys::connect_stream(&node[..end]) else {
        return refused(b"the node cannot be reached; is it running, and as this user?");
    };
    let socket = sys::out_of_the_way(socket);
    set_patience(socket);
    // SAFETY: within the array, which is not written any more.
    let request = unsafe { std::slice::from_raw_parts(request, length) };
    let mut answer = [0u8; MAX_LINE];
    let Some(answer) = exchange(socket, request, &mut answer) else {
        sys::close(socket);
        return refused(b"the node does not answer");
    };
    if let Some(found) = text_after(answer, b"\"socket\":\"")
        && found.len() < path.len()
    {
        path[..found.len()].copy_from_slice(found);
        path[found.len()] = 0;
        return Ok(());
    }
    sys::close(socket);
    refused(text_after(answer, b"\"refused\":\"").unwrap_or(b"the node's answer is not understood"))
}

fn exchange<'a>(socket: RawFd, request: &[u8], answer: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut sent = 0;
    while sent < request.len() {
        sent += sys::send(socket, &request[sent..]).ok()?;
    }
    let mut length = 0;
    while !answer[..length].contains(&b'\n') {
        match sys::read(socket, &mut answer[length..]) {
            Ok(0) | Err(_) => return None,
            Ok(read) => length += read,
        }
    }
    Some(&answer[..length])
}

/// The text of a JSON string whose beginning is `key`. Paths with quotes or backslashes in them
/// come escaped, and lead nowhere.
fn text_after<'a>(line: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let start = line.windows(key.len()).position(|part| part == key)? + key.len();
    let rest = line.get(start..)?;
    rest.get(..rest.iter().position(|&byte| byte == b'"')?)
}

fn set_patience(socket: RawFd) {
    let patience = libc::timeval { tv_sec: PATIENCE_SECONDS, tv_usec: 0 };
    // SAFETY: the kernel reads the structure.
    let _ = unsafe {
        let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_RCVTIMEO as usize);
        let (at, len) = (&raw const patience as usize, size_of::<libc::timeval>());
        syscall(libc::SYS_setsockopt, [socket as usize, level, name, at, len, 0])
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_answers_is_understood() {
        let answer = br#"{"pager":{"name":"db","socket":"/run/hecaton/pager-1.sock","pid":7}}"#;
        assert_eq!(text_after(answer, b"\"socket\":\""), Some(&b"/run/hecaton/pager-1.sock"[..]));
        let refused = br#"{"refused":"the node has a consumer `db` already"}"#;
        assert_eq!(text_after(refused, b"\"socket\":\""), None);
        assert!(text_after(refused, b"\"refused\":\"").is_some());
        for damaged in [&b""[..], b"\"socket\":\"", b"\"socket\":\"x"] {
            assert_eq!(text_after(damaged, b"\"socket\":\""), None);
        }
    }
}
