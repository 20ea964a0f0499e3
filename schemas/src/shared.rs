//! JSON of parts that requests share: written and read as if each request had its own.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(crate) fn serialize<T: Serialize + ?Sized, S: Serializer>(part: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
    part.as_ref().serialize(serializer)
}

pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<Arc<T>, D::Error>
where
    T: ToOwned<Owned: Deserialize<'de>> + ?Sized,
    Arc<T>: From<T::Owned>,
    D: Deserializer<'de>,
{
    T::Owned::deserialize(deserializer).map(Arc::from)
}

/// The same for a part that may be missing.
pub(crate) mod optional {
    use super::*;

    pub(crate) fn serialize<T: Serialize + ?Sized, S: Serializer>(
        part: &Option<Arc<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        part.as_deref().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<Arc<T>>, D::Error>
    where
        T: ToOwned<Owned: Deserialize<'de>> + ?Sized,
        Arc<T>: From<T::Owned>,
        D: Deserializer<'de>,
    {
        Ok(Option::<T::Owned>::deserialize(deserializer)?.map(Arc::from))
    }
}
