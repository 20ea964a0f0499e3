//! ggml's RPC backend: registers a server whose devices compute a part of a model, and runs such a server.
//!
//! The Rust binding lacks both calls, so they are fetched from ggml's registry by name. ggml's client ends the process
//! on any failure, and its server trusts whoever connects. So [`crate::workers`] runs both in processes of their own on
//! loopback, and [`OwnSockets`] tells who has connected. Has `unsafe` code.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;

use llama_cpp_sys_2 as sys;
use socket2::SockRef;

use super::backend::backend;
use crate::serving::LoadError;

const NO_RPC: &str =
    "this build of llama.cpp has no RPC backend. Build it with GGML_RPC=ON, as .cargo/config.toml does";

/// `ggml_backend_rpc_add_server` of ggml-rpc.h.
type AddServer = unsafe extern "C" fn(endpoint: *const c_char) -> sys::ggml_backend_reg_t;

/// `ggml_backend_rpc_start_server` of ggml-rpc.h.
type StartServer = unsafe extern "C" fn(
    endpoint: *const c_char,
    cache_dir: *const c_char,
    n_threads: usize,
    n_devices: usize,
    devices: *mut sys::ggml_backend_dev_t,
);

/// Connects to the server at `endpoint` and registers its devices. Returns llama.cpp's indices of them. The connection
/// stays until the process ends, which it does if the server fails.
pub(super) fn add_server(endpoint: SocketAddr) -> Result<Vec<usize>, LoadError> {
    backend()?;
    let refused = || LoadError::Backend(format!("the worker at {endpoint} lends no device"));
    let text = CString::new(endpoint.to_string()).map_err(|_| refused())?;
    let function = function(c"ggml_backend_rpc_add_server")?;
    // SAFETY: ggml-rpc.h declares the function of this name with this type.
    let add_server = unsafe { std::mem::transmute::<*mut c_void, AddServer>(function) };
    // SAFETY: ggml copies the text. The registry that it returns lives as long as the process.
    let (first, end) = unsafe {
        let registry = add_server(text.as_ptr());
        if registry.is_null() {
            return Err(refused());
        }
        let first = sys::ggml_backend_dev_count();
        sys::ggml_backend_register(registry);
        (first, sys::ggml_backend_dev_count())
    };
    if first == end {
        return Err(refused());
    }
    // ggml closes a connection that nothing uses. This backend uses it as long as the process lives.
    // SAFETY: the index is one of those that were just registered.
    let kept = unsafe { sys::ggml_backend_dev_init(sys::ggml_backend_dev_get(first), std::ptr::null()) };
    if kept.is_null() { Err(refused()) } else { Ok((first..end).collect()) }
}

/// Serves devices at `endpoint` until the process ends. Returns only if that is not possible.
pub(crate) fn serve(endpoint: SocketAddr, n_threads: usize, devices: &[usize]) -> Result<(), LoadError> {
    backend()?;
    let text = CString::new(endpoint.to_string()).map_err(|e| LoadError::Backend(e.to_string()))?;
    let function = function(c"ggml_backend_rpc_start_server")?;
    // SAFETY: ggml-rpc.h declares the function of this name with this type.
    let start_server = unsafe { std::mem::transmute::<*mut c_void, StartServer>(function) };
    // SAFETY: ggml returns null for an index that it does not have, which is left out.
    let found = devices.iter().map(|&index| unsafe { sys::ggml_backend_dev_get(index) });
    let mut found: Vec<sys::ggml_backend_dev_t> = found.filter(|device| !device.is_null()).collect();
    // SAFETY: the text and the devices outlive the call. No cache folder is given, so the server writes no files.
    unsafe { start_server(text.as_ptr(), std::ptr::null(), n_threads, found.len(), found.as_mut_ptr()) };
    Err(LoadError::Backend(format!("ggml's RPC server does not run at {endpoint}")))
}

fn function(name: &CStr) -> Result<*mut c_void, LoadError> {
    // SAFETY: both names end with a zero. ggml returns null for what it does not have.
    let function = unsafe {
        let registry = sys::ggml_backend_reg_by_name(c"RPC".as_ptr());
        if registry.is_null() {
            return Err(LoadError::Backend(NO_RPC.to_owned()));
        }
        sys::ggml_backend_reg_get_proc_address(registry, name.as_ptr())
    };
    if function.is_null() { Err(LoadError::Backend(NO_RPC.to_owned())) } else { Ok(function) }
}

/// This process's TCP sockets.
#[derive(Debug)]
pub(crate) struct OwnSockets {
    /// The local and the remote address of each connection.
    connected: Vec<(SocketAddr, SocketAddr)>,
    /// The addresses of sockets that are not connected.
    bound: Vec<SocketAddr>,
}

impl OwnSockets {
    /// The connections that are open now.
    pub(crate) fn now() -> std::io::Result<OwnSockets> {
        let (mut connected, mut bound) = (Vec::new(), Vec::new());
        // Linux and macOS list a process's descriptors here.
        for entry in std::fs::read_dir(Path::new("/dev/fd"))? {
            let number = entry?.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok());
            let Some(number) = number.filter(|number| *number >= 0) else { continue };
            // SAFETY: only the system is asked for the addresses of this number. Should another thread close the file
            // meanwhile, the system answers with an error, or for the socket that has the number then.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            let socket = SockRef::from(&descriptor);
            // ggml leaves this out. A process that lends would inherit its sockets, and keep connections open that ggml has closed.
            let _ = socket.set_cloexec(true);
            let local = socket.local_addr().ok().and_then(|address| address.as_socket());
            let remote = socket.peer_addr().ok().and_then(|address| address.as_socket());
            match (local, remote) {
                (Some(local), Some(remote)) => connected.push((local, remote)),
                (Some(local), None) => bound.push(local),
                (None, _) => {}
            }
        }
        Ok(OwnSockets { connected, bound })
    }

    /// Returns true if a socket of this process has this address, and listens there or is about to.
    pub(crate) fn has_bound(&self, address: SocketAddr) -> bool {
        self.bound.contains(&address)
    }

    /// Returns true if this process has connected from `local` to `remote`.
    pub(crate) fn has_connection(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.connected.contains(&(local, remote))
    }

    /// The other ends of the connections to this process's `address`.
    pub(crate) fn callers(&self, address: SocketAddr) -> impl Iterator<Item = SocketAddr> {
        self.connected.iter().filter(move |(local, _)| *local == address).map(|(_, remote)| *remote)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::io::{FdFlags, fcntl_getfd};

    use super::super::devices;
    use super::*;

    #[test]
    fn a_process_knows_the_ends_of_its_own_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        let open = OwnSockets::now().unwrap();
        assert!(open.has_connection(peer, address) && !open.has_connection(peer, peer));
        assert!(open.has_bound(address) && !open.has_bound(peer));
        assert!(open.has_connection(accepted.local_addr().unwrap(), peer));
        assert_eq!(open.callers(address).collect::<Vec<_>>(), [peer]);
        drop(client);
        drop(accepted);
        let open = OwnSockets::now().unwrap();
        assert!(!open.has_connection(peer, address) && open.callers(address).next().is_none());
    }

    #[test]
    fn processes_that_are_started_later_inherit_no_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // As ggml leaves its sockets.
        SockRef::from(&client).set_cloexec(false).unwrap();
        OwnSockets::now().unwrap();
        assert!(fcntl_getfd(&client).unwrap().contains(FdFlags::CLOEXEC));
    }

    #[test]
    fn the_backend_is_built_in_and_lends_the_processor_where_there_is_no_gpu() {
        backend().unwrap();
        function(c"ggml_backend_rpc_add_server").unwrap();
        function(c"ggml_backend_rpc_start_server").unwrap();
        assert!(matches!(function(c"ggml_backend_rpc_nothing"), Err(LoadError::Backend(_))));
        assert_eq!(devices::lendable(Some("cpu")).unwrap().len(), 1);
        assert!(devices::lendable(Some("Warp9")).is_err());
    }
}
