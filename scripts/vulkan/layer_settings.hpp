// What llama.cpp's Vulkan backend needs of VK_EXT_layer_settings, for headers that are older than that extension, as
// Debian 12's are (1.3.239). scripts/check-vulkan.sh has it included before every C++ file of llama.cpp; with newer
// headers it is empty. The values are those of the Vulkan specification.
#pragma once
#if __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>
#if VK_HEADER_VERSION < 272
#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : int { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType sType = static_cast<VkStructureType>(1000496000);
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}
};

} // namespace vk
#endif
#endif
