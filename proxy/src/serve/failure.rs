/// A failure that ends a command: one line for the operator, which says what happened and what to do.
#[derive(Debug)]
pub struct CommandFailure(pub String);

impl<E: std::error::Error> From<E> for CommandFailure {
    fn from(error: E) -> Self {
        CommandFailure(error.to_string())
    }
}
